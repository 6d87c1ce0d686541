"""Whether the Triton kernels are right on this GPU.

Models have random weights at published sizes, so nothing is downloaded. Every check returns what it
found and whether that is right; `scripts/check_gpu.py` prints them. A check that raises is wrong,
and hides nothing that comes after it.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import yaml
from gguf import GGMLQuantizationType as Type
from torch import Tensor
from transformers import PreTrainedModel

from bild_lab.benchmark.bench import random_model
from bild_lab.engine.draft import Tree
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.methods.early_exit.calm import leave_layer_by_layer, saturation
from bild_lab.engine.methods.fr_spec import NarrowSession
from bild_lab.engine.methods.speculative.draft_model import draft_chain
from bild_lab.engine.methods.speculative.draft_tree import grow_tree
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native.cpu.panels import PLAIN
from bild_lab.engine.models.native.gpu import TritonDecoder
from bild_lab.engine.models.native.gpu.block_matrix import (
    BLOCK,
    FOUR_BITS,
    PAIR,
    BlockMatrix,
)
from bild_lab.engine.models.native.layers import Decoder, NativeLayers
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from bild_lab.engine.models.native.quantized_matrix import quantize_weights
from bild_lab.engine.models.native.stack import Layer
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import (
    ChainResult,
    ChainSpec,
    Drafted,
    DraftSpec,
    GrownTree,
    OutputSpec,
    Rows,
    TreeSpec,
)

ROW_COUNTS = (2, 3, 8, 9, 16, 24, 33, 64)  # that must have the bits of one row
PROMPT = 40  # tokens, few enough to run by the kernels
SOURCE = 64  # tokens of an encoder
LONG_TEXT = 500  # slots before the rows of a long text, and of a timing
REPEATS = 30  # of what a race would change
CHAIN_STEPS = 8
TEMPERATURE = 0.8
VOCABULARY_STEP = 4  # between the tokens of a draft vocabulary
# EAGLE-2's width and children
TREE = TreeSpec(nodes=60, depth=6, width=10, children=10, end_tokens=frozenset())
MOST_DRAFTED = 64  # rows of a chain or a tree, and those before it
ROOM = 1024
MOST_OF_ERROR = 2000  # the last characters of its traceback
# how much larger the kernels' mean error may be than PyTorch's in the same precision
MOST_ERROR = 1.3


_STORED = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
MODELS: dict[str, Mapping[str, Any]] = {
    name: values for name, values in _STORED.items() if not name.startswith(".")
}
# models with weights in blocks, by names such as llama-7b-Q4_K; of Q4_K_M some are in Q6_K
BLOCKS: dict[str, tuple[str, int, bool]] = {
    f"{name}-{type.name}": (name, type, False)
    for name in MODELS
    for type in (Type.Q8_0, Type.Q4_0, Type.Q4_K, Type.Q6_K)
} | {f"{name}-Q4_K_M": (name, Type.Q4_K, True) for name in ("qwen2.5-1.5b", "llama-7b")}
# what `make gpu` checks; the others by their names
USUAL = (
    "t5-small",
    "t5-large",
    "qwen2.5-0.5b",
    "qwen2.5-1.5b",
    "gemma3-270m",
    "qwen2.5-0.5b-Q8_0",
    "qwen2.5-1.5b-Q4_0",
    "qwen2.5-1.5b-Q4_K_M",
)


@dataclass(frozen=True)
class Finding:
    """What a check found. right: None for a figure that is neither right nor wrong."""

    text: str
    right: bool | None = None


class KernelCheck:
    """The checks of one model.

    make: the model, with random weights. dtype: bfloat16 or float16; float32 in the interpreter.
    type: of the matrices, as in `BlockMatrix`. mixed: of Q4_K, some in Q6_K (`as_q4_k_m`).
    """

    def __init__(
        self,
        make: Callable[[], PreTrainedModel],
        device: torch.device,
        dtype: torch.dtype,
        type: int = PLAIN,
        mixed: bool = False,
    ) -> None:
        self.device, self.dtype = device, dtype
        torch.manual_seed(0)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with device:
                module = make().to(dtype).eval()
        finally:
            torch.set_default_dtype(default)
        self._module = module
        self.decoder = decoder_of(module)
        if type != PLAIN:
            quantize_weights(self.decoder, partial(matrix_in_blocks, type=type))
        if mixed:
            decoder = self.decoder
            key_count = (decoder.heads + decoder.kv_heads) * decoder.head_dim
            decoder.layers = [as_q4_k_m(layer, key_count) for layer in decoder.layers]
        self.kernels = TritonDecoder(self.decoder)
        self.vocab = self.decoder.embedding.shape[0]
        draws = torch.Generator().manual_seed(1)
        self.tokens: list[int] = torch.randint(
            3, self.vocab, (PROMPT + ROOM,), generator=draws
        ).tolist()
        self.fed = self.tokens[:2]  # before a draft
        self.source_ids = (
            torch.tensor([self.tokens[-SOURCE:]], device=device)
            if isinstance(self.decoder, T5Decoder)
            else None
        )

    @classmethod
    def of(cls, name: str, device: torch.device) -> KernelCheck:
        """The checks of a model of this name, of MODELS or BLOCKS, in bfloat16."""
        plain_name, type, mixed = BLOCKS.get(name, (name, PLAIN, False))
        make = partial(random_model, MODELS[plain_name])
        return cls(make, device, torch.bfloat16, type, mixed)

    def findings(self) -> Iterator[Finding]:
        """All checks, one after the other."""
        for check in (
            self.numbers,
            self.numbers_of_a_long_text,
            self.same_bits,
            self.tree_is_chain,
            self.texts_side_by_side,
            self.resumed_is_straight,
            self.program_is_loop,
            self.drawn_program_is_loop,
            self.narrow_program_is_loop,
            self.tree_program_is_loop,
            self.programs_side_by_side,
            self.exit_is_loop,
            self.repeats_are_equal,
            self.graph_is_eager,
            self.overlap_changes_nothing,
            self.tickets,
        ):
            yield attempted(check)

    # checks

    def numbers(self) -> Finding:
        """The kernels' error against float32 is that of PyTorch in the same precision."""
        return self._numbers_after(0)

    def numbers_of_a_long_text(self) -> Finding:
        """`numbers` after a long text, where attention merges chunks of slots."""
        return self._numbers_after(LONG_TEXT)

    def _numbers_after(self, slots: int) -> Finding:
        """slots: how many come before the rows, of which a prompt has the first."""

        def logits(decoder: Decoder, kernels: bool) -> torch.Tensor:
            session = self.session(decoder, kernels)
            self.lengthen(session, slots)
            return session.extend(self.tokens[:16]).logits

        exact_decoder = with_blocks_of(
            self.decoder, decoder_of(copy.deepcopy(self._module).float())
        )
        exact = logits(exact_decoder, kernels=False)
        del exact_decoder
        errors = [
            float((logits(self.decoder, kernels) - exact).abs().mean()) for kernels in (False, True)
        ]
        share = errors[1] / max(errors[0], 1e-30)
        right = share <= MOST_ERROR or errors[1] < 1e-4 * float(exact.std())
        return Finding(
            f"mean error against float32 after {max(slots, PROMPT)} slots {errors[1]:.2e}, of PyTorch"
            f" {errors[0]:.2e}",
            right,
        )

    def same_bits(self) -> Finding:
        """A row has the bits that it has alone, whatever number of rows runs."""
        alone = self.session()
        most_rows = max(ROW_COUNTS)
        expected = torch.cat([alone.extend([token]).logits for token in self.tokens[:most_rows]])
        differing = [
            count
            for count in ROW_COUNTS
            if not torch.equal(self.session().extend(self.tokens[:count]).logits, expected[:count])
        ]
        return Finding(
            f"rows of forwards of {', '.join(map(str, ROW_COUNTS))}: "
            + (f"other bits with {differing}" if differing else "the bits of one row"),
            not differing,
        )

    def tree_is_chain(self) -> Finding:
        """A branch of a tree has the bits of the chain."""
        first, second, third, sibling, late = self.tokens[:5]
        chain = self.session().extend([first, second, third]).logits
        parents = torch.tensor([-1, 0, 0, 2, 1], device=self.device)
        rows = Rows([first, sibling, second, third, late], Tree(parents))
        branch = self.session().extend(rows).logits[[0, 2, 3]]
        return outcome("a branch of a tree is the chain", torch.equal(branch, chain))

    def texts_side_by_side(self) -> Finding:
        """Rows of two texts of different lengths have the bits that each has alone."""
        sessions = [self.session(), self.session()]
        sessions[0].extend(self.tokens[:3])
        sessions[1].extend(self.tokens[3:10])
        texts = [
            session.layers.text_rows(session.layers.reserved + session.length, count, count)
            for session, count in zip(sessions, (2, 3), strict=True)
        ]
        rows = torch.tensor(self.tokens[20:25], device=self.device)
        together = self.kernels.run(rows, texts).logits
        alone = [sessions[0].extend(rows[:2]).logits, sessions[1].extend(rows[2:]).logits]
        return outcome("texts side by side", torch.equal(together, torch.cat(alone)))

    def resumed_is_straight(self) -> Finding:
        """Rows that go on from the states of the first layer have the bits of one forward."""
        depth, rows = len(self.decoder.layers), self.tokens[:5]
        straight = self.session().extend(rows).logits
        session = self.session()
        first_layer = session.extend(rows, OutputSpec(logits=0, layers=range(1), hidden=(1,)))
        later_layers = OutputSpec(layers=range(1, depth))
        resumed = session.extend(Rows(rows, states=first_layer.hidden[0]), later_layers).logits
        return outcome("layers in two forwards", torch.equal(resumed, straight))

    def program_is_loop(self) -> Finding:
        """A chain drafted by one program is the loop's, also where a threshold ends it."""
        chain = ChainSpec(CHAIN_STEPS, frozenset())
        confidences = self.drafted_by_loop(replace(chain, threshold=0.0)).confidences
        ended = replace(chain, threshold=sorted(confidences)[CHAIN_STEPS // 2] * 1.001)
        right = self.drafts_as_loop(chain) and self.drafts_as_loop(ended)
        return outcome(f"a chain of {CHAIN_STEPS} in one program", right)

    def drawn_program_is_loop(self) -> Finding:
        """A chain that is drawn is the loop's: its graph has operators of PyTorch among our kernels."""
        draws = torch.Generator().manual_seed(2)
        uniforms = torch.rand(CHAIN_STEPS, generator=draws, dtype=torch.float64).to(self.device)
        chain = ChainSpec(CHAIN_STEPS, frozenset(), None, TEMPERATURE, uniforms, keeps_probs=True)
        return outcome(f"a chain of {CHAIN_STEPS} drawn in one program", self.drafts_as_loop(chain))

    def narrow_program_is_loop(self) -> Finding:
        """A chain of a draft vocabulary is the loop's."""
        vocabulary = DraftVocabulary(range(0, self.vocab, VOCABULARY_STEP))
        chain = ChainSpec(CHAIN_STEPS, frozenset(), vocabulary=vocabulary)
        right = self.drafts_as_loop(chain)
        return outcome(f"a chain of {len(vocabulary)} tokens in one program", right)

    def drafts_as_loop(self, chain: ChainSpec) -> bool:
        """Whether one program drafts what one forward after another does."""
        expected, drafted = self.drafted_by_loop(chain), self.session().draft(self.fed, chain)
        same_probs = expected.probs is None or torch.allclose(
            drafted.probs, expected.probs, atol=1e-6
        )
        return (
            same_probs
            and list(map(int, drafted.tokens)) == list(map(int, expected.tokens))
            and drafted.forwards == expected.forwards
        )

    def drafted_by_loop(self, chain: ChainSpec) -> ChainResult:
        """A chain that is drafted by one forward after another."""
        session = self.session()
        if chain.vocabulary is not None:
            session = NarrowSession(session, chain.vocabulary)
        return draft_chain(session, self.fed, chain, Sampling(chain.temperature))

    def tree_program_is_loop(self) -> Finding:
        """Trees grown by one program are the loop's, also where an end token, a chance or sure rows
        end them; and so are the rows that are kept.
        """
        fed = self.fed
        confidence = float(self.session().extend(fed).logits[-1].float().softmax(-1).max())
        first_token = self.grown_by_loop(self.session(), fed, replace(TREE, depth=1)).tokens[0]
        tree_specs = (
            TREE,
            replace(TREE, end_tokens=frozenset([first_token])),
            replace(TREE, min_prob=0.999 * confidence),
            replace(TREE, prune_confidence=0.999 * confidence),
            replace(TREE, temperature=TEMPERATURE),
        )
        loop, session = self.session(), self.session()
        start, right = session.length, True
        for tree_spec in tree_specs:
            loop.rollback(start)
            session.rollback(start)
            expected, grown = (
                self.grown_by_loop(loop, fed, tree_spec),
                session.draft(fed, tree_spec),
            )
            right &= (grown.tokens, grown.parents, grown.rows, grown.forwards[1:]) == (
                expected.tokens,
                expected.parents,
                expected.rows,
                expected.forwards[1:],
            )
        loop.keep([0])
        session.keep([0])
        right &= torch.equal(loop.extend(fed).logits, session.extend(fed).logits)
        return outcome(f"a tree of {TREE.depth} levels in one program", right)

    def programs_side_by_side(self) -> Finding:
        """Texts of different lengths draft together, each time, the chains and trees that each
        drafts alone, though they end at different steps; their keys and values have the same bits.
        """
        sessions = [self.session(), self.session(), self.long_session()]
        sessions[1].extend(self.tokens[:3])
        tokens = [self.tokens[:count] for count in (2, 1, 3)]
        texts = [
            session.layers.text_rows(session.layers.reserved + session.length, len(fed))
            for session, fed in zip(sessions, tokens, strict=True)
        ]
        all_steps, depths = (CHAIN_STEPS, CHAIN_STEPS // 2, 1), (1, TREE.depth, TREE.depth - 1)
        chains = [ChainSpec(steps, frozenset(), threshold=0.0) for steps in all_steps]
        trees = [replace(TREE, depth=depth) for depth in depths]
        differing = []
        for name, specs in (("chains", chains), ("trees", trees)):
            alone = [
                self.drafted_rows([fed], [text], [spec])[0]
                for fed, text, spec in zip(tokens, texts, specs, strict=True)
            ]
            for _ in range(REPEATS):
                together = self.drafted_rows(tokens, texts, specs)
                drafted = all(draft is not None for draft, _, _ in together)
                if not drafted or not all(map(same, together, alone)):
                    differing.append(name)
                    break
        text = f"{REPEATS} times chains and trees of {len(texts)} texts in one program: "
        if differing:
            return Finding(f"{text}OTHER BITS of {' and '.join(differing)}", right=False)
        return Finding(f"{text}the same bits", right=True)

    def drafted_rows(
        self,
        tokens: Sequence[Sequence[int]],
        texts: Sequence[SequenceSlice],
        specs: Sequence[DraftSpec],
    ) -> list[tuple[Drafted | None, Tensor, Tensor]]:
        """What these texts draft together, none of whose rows lie in their caches before; and the keys
        and values of the rows that ran for it, each [layers, heads, rows, dim].
        """
        for text in texts:
            for store in (text.cache.keys, text.cache.values):
                store[:, :, text.start : text.start + MOST_DRAFTED].zero_()
        drafts = self.kernels.draft(tokens, texts, specs)
        results = []
        for fed, text, draft in zip(tokens, texts, drafts, strict=True):
            ran = 0 if draft is None else len(fed) + sum(draft.later_rows)
            rows = slice(text.start, text.start + ran)
            keys, values = text.cache.keys[:, :, rows], text.cache.values[:, :, rows]
            results.append((draft, keys.clone(), values.clone()))
        return results

    def exit_is_loop(self) -> Finding:
        """A row that leaves early in one program is the row that runs layer by layer."""
        program, loop = self.session(), self.session()
        logits, layers = self.leave(program, in_one=True)
        expected, expected_layers = self.leave(loop, in_one=False)
        next_rows = [session.extend(self.tokens[1:2]).logits for session in (program, loop)]
        right = (
            layers == expected_layers
            and torch.equal(logits, expected)
            and torch.equal(next_rows[0], next_rows[1])
        )
        depth = len(self.decoder.layers)
        return outcome(f"an exit after {layers} of {depth} layers in one program", right)

    @cached_property
    def exit_threshold(self) -> float:
        """Just below the median of the cosines of the layers' inputs and outputs, of a session's
        next row.
        """
        depth = len(self.decoder.layers)
        states = self.session().extend(self.tokens[:1], OutputSpec(hidden=range(depth + 1))).hidden
        cosines = [float(saturation(*pair, None)) for pair in pairwise(states[:-1])]
        return sorted(cosines)[len(cosines) // 2] - 1e-4

    def leave(self, session: CachedSession, in_one: bool) -> tuple[torch.Tensor, int]:
        """The logits of a row that leaves early, and how many layers ran."""
        token, threshold = self.tokens[0], self.exit_threshold
        if in_one:
            return session.forward_until_confident(token, threshold)
        depth = len(self.decoder.layers)
        return leave_layer_by_layer(session, token, threshold, saturation, depth)

    def repeats_are_equal(self) -> Finding:
        """Forwards, a chain, a tree and an exit after a long text give the same each time, unlike
        kernels that race.
        """
        session = self.long_session()
        length = session.length
        first_results, differing = self._passes(session, length), set()
        for _ in range(REPEATS - 1):
            results = self._passes(session, length)
            differing |= {
                name for name, result in first_results.items() if not same(results[name], result)
            }
        text = f"{REPEATS} times {', '.join(first_results)} after {length} slots: "
        if differing:
            return Finding(f"{text}OTHER RESULTS of {', '.join(sorted(differing))}", right=False)
        return Finding(f"{text}the same results", right=True)

    def _passes(self, session: CachedSession, length: int) -> dict[str, Any]:
        """What a pass of each kind gives after the first so many slots of a session."""
        row, results = self.tokens[:1], {}
        for count in (1, max(ROW_COUNTS)):
            session.rollback(length)
            results[f"{count} rows"] = session.extend(self.tokens[:count]).logits
        session.rollback(length)
        results["a chain"] = session.draft(row, ChainSpec(CHAIN_STEPS, frozenset())).tokens
        session.rollback(length)
        tree = session.draft(row, TREE)
        results["a tree"] = tree.tokens, tree.parents
        session.rollback(length)
        results["an exit"], _ = self.leave(session, in_one=True)
        return results

    def graph_is_eager(self) -> Finding:
        """A replayed graph gives what its kernels give when they are launched one by one."""
        rows, graphs = self.tokens[:8], self.kernels.graphs
        replayed = self.session().extend(rows).logits
        captures, graphs.captures = graphs.captures, False
        graphs.clear()
        try:
            eager = self.session().extend(rows).logits
        finally:
            graphs.captures = captures
            graphs.clear()
        return outcome("a graph's replay", torch.equal(replayed, eager))

    def overlap_changes_nothing(self) -> Finding:
        """Kernels that begin while those before them run give what they give in turn."""
        plan = self.kernels.plan
        if not plan.overlap:
            return Finding("kernels run in turn on this GPU")
        spec, rows = ChainSpec(CHAIN_STEPS, frozenset()), self.tokens[:8]
        results = []
        try:
            for overlap in (True, False):
                plan.overlap = overlap
                self.kernels.graphs.clear()
                session = self.session()
                logits, chain = session.extend(rows).logits, session.draft(rows[:1], spec)
                results.append((logits, chain.tokens, session.draft(rows[:1], TREE)))
        finally:
            plan.overlap = True
            self.kernels.graphs.clear()
        right = torch.equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]
        return outcome("kernels that overlap", right)

    def tickets(self) -> Finding:
        """No program has kept a ticket."""
        return outcome("tickets", not int(self.kernels.plan.buffers.tickets.abs().sum()))

    def grown_by_loop(
        self, session: CachedSession, tokens: list[int], tree_spec: TreeSpec
    ) -> GrownTree:
        """A tree that grows by one forward after another."""
        return grow_tree(session, tokens, tree_spec, Sampling(tree_spec.temperature))

    # sessions

    def session(self, decoder: Decoder | None = None, kernels: bool = True) -> CachedSession:
        """A session after a prompt."""
        decoder = self.decoder if decoder is None else decoder
        prompt = (0,) if self.source_ids is not None else tuple(self.tokens[-PROMPT:])
        layers = NativeLayers(
            decoder,
            Source(prompt, self.source_ids),
            ROOM,
            packed=self.kernels if kernels else None,
        )
        session = CachedSession(layers, prompt)
        session.prefill()  # else the prompt's rows run with the next ones
        return session

    def long_session(self) -> CachedSession:
        """A session after a long text."""
        session = self.session()
        self.lengthen(session, LONG_TEXT)
        return session

    def lengthen(self, session: CachedSession, slots: int) -> None:
        """Run tokens until the session has so many."""
        while (missing := slots - session.length) > 0:
            start = session.length
            session.extend(self.tokens[start : start + min(64, missing)])


def attempted(check: Callable[[], Finding]) -> Finding:
    """What a check found; an error that it raises is wrong, and hides no check after it."""
    try:
        with torch.inference_mode():
            return check()
    except Exception as error:
        return raised(check.__name__.replace("_", " "), error)


def raised(what: str, error: Exception) -> Finding:
    """An error, and where it was raised."""
    lines = "".join(traceback.format_exception(error))
    return Finding(f"{what} raised an error\n{lines[-MOST_OF_ERROR:].strip()}", right=False)


def same(result: Any, other: Any) -> bool:
    """Whether two results are equal, tensors to the last bit."""
    if isinstance(result, tuple):
        return all(map(same, result, other))
    return torch.equal(result, other) if isinstance(result, torch.Tensor) else result == other


def decoder_of(module: PreTrainedModel) -> Decoder:
    return (T5Decoder if module.config.is_encoder_decoder else LlamaDecoder)(module)


def matrix_in_blocks(matrix: Tensor, type: int) -> tuple[BlockMatrix]:
    """A matrix rounded to 8 or 4 bits; of the types with blocks, random numbers about as large.

    Where a line is no multiple of a block, these are rounded, too.
    """
    outputs, inputs = matrix.shape
    if type in (Type.Q8_0, Type.Q4_0) or inputs % BLOCK:
        return (BlockMatrix.rounded(matrix, 4 if type in FOUR_BITS else 8),)
    random_bytes = partial(torch.randint, device=matrix.device, dtype=torch.int8)
    if type == Type.Q4_K:
        numbers = random_bytes(-8, 8, (outputs, inputs))
        steps = random_bytes(20, 40, (outputs, inputs // PAIR, 2))
        scales = torch.cat([steps, steps], 2)  # a minimum is as many steps, each of 7.5 numbers
        largest, of_scales = 7.5 * 30, (1.0, 7.5)
    else:
        numbers = random_bytes(-32, 32, (outputs, inputs))
        scales = random_bytes(60, 120, (outputs, inputs // PAIR, 4))
        largest, of_scales = 32 * 90, (1.0, 0.0)
    size = 2 * float(matrix.float().std()) / largest
    block_scales = (torch.tensor(of_scales, device=matrix.device) * size).half()
    block_scales = block_scales.repeat(outputs, inputs // BLOCK)
    return (BlockMatrix.of_numbers(type, numbers, scales.flatten(1), block_scales),)


def as_q4_k_m(layer: Layer, key_count: int) -> Layer:
    """A layer of Q4_K as files of llama.cpp's Q4_K_M have some: values and the last matrix in Q6_K.

    key_count: how many outputs are queries and keys.
    """
    (projections,), (outer,) = layer.qkv.matrix, layer.outer.matrix
    keys, values = projections[:key_count], projections[key_count:]
    in_six_bits = [
        matrix_in_blocks(matrix.numbers(torch.float32), Type.Q6_K)[0] for matrix in (values, outer)
    ]
    return layer.with_matrices({"qkv": (keys, in_six_bits[0]), "outer": (in_six_bits[1],)})


def with_blocks_of(decoder: Decoder, other_decoder: Decoder) -> Decoder:
    """The other decoder, with the matrices that are in blocks in the first."""
    other_decoder.layers = [
        other_layer.with_matrices(
            {
                name: weight.matrix
                for name, weight in layer_in_blocks.weights.items()
                if isinstance(weight.matrix, tuple)
            }
        )
        for layer_in_blocks, other_layer in zip(decoder.layers, other_decoder.layers, strict=True)
    ]
    if isinstance(decoder.head, tuple):
        other_decoder.read_head = decoder.read_head
    return other_decoder


def outcome(what: str, right: bool) -> Finding:
    return Finding(f"{what}: {'the same bits' if right else 'OTHER BITS'}", right)
