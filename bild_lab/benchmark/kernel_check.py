"""Whether the Triton kernels are right on this GPU, and how near they are to its memory's speed.

Models have random weights at published sizes, so nothing is downloaded. Every check returns what it
found and whether that is right; `scripts/check_gpu.py` prints them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from bild_lab.engine.draft import Tree
from bild_lab.engine.methods.early_exit.calm import leave_layer_by_layer, saturation
from bild_lab.engine.methods.speculative.draft_tree import grow_tree
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native.gpu import TritonDecoder
from bild_lab.engine.models.native.layers import Decoder, NativeLayers
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Source
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import ChainSpec, GrownTree, OutputSpec, Rows, TreeSpec
from bild_lab.lab.measure.machine import median_s

ROW_COUNTS = (2, 3, 8, 9, 16, 24, 33, 64)  # that must have the bits of one row
TIMED_ROWS = (1, 4, 8, 16, 64)
PROMPT = 40  # tokens, few enough to run by the kernels
SOURCE = 64  # tokens of an encoder
TIMED_START = 500  # slots before the rows of a timing, as in a long text
CHAIN_STEPS = 8
# EAGLE-2's width and children
TREE = TreeSpec(nodes=60, depth=6, width=10, children=10, end_tokens=frozenset())
REPLAYS = 10  # of a graph in one timing, so that the host is not timed
ROOM = 1024
# how much larger the kernels' mean error may be than PyTorch's in the same precision
MOST_ERROR = 1.3


def t5(**sizes: Any) -> Callable[[], PreTrainedModel]:
    return lambda: T5ForConditionalGeneration(T5Config(vocab_size=32128, **sizes))


def decoder_only(
    model: type[PreTrainedModel], config: type, **sizes: Any
) -> Callable[[], PreTrainedModel]:
    return lambda: model(config(max_position_embeddings=4096, **sizes))


MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "t5-small": t5(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8),
    "t5-large": t5(d_model=1024, d_kv=64, d_ff=4096, num_layers=24, num_heads=16),
    "t5-3b": t5(d_model=1024, d_kv=128, d_ff=16384, num_layers=24, num_heads=32),
    "t5-v1.1-large": t5(
        d_model=1024,
        d_kv=64,
        d_ff=2816,
        num_layers=24,
        num_heads=16,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
    "qwen2.5-0.5b": decoder_only(
        Qwen2ForCausalLM,
        Qwen2Config,
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=24,
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": decoder_only(
        Qwen2ForCausalLM,
        Qwen2Config,
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ),
    "qwen3-0.6b": decoder_only(
        Qwen3ForCausalLM,
        Qwen3Config,
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "gemma3-270m": decoder_only(
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
    ),
    "llama-68m": decoder_only(
        LlamaForCausalLM,
        LlamaConfig,
        vocab_size=32000,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=2,
        num_attention_heads=12,
    ),
    "llama-7b": decoder_only(
        LlamaForCausalLM,
        LlamaConfig,
        vocab_size=32000,
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=32,
        num_attention_heads=32,
    ),
}
# what `make gpu` checks; the others by their names
USUAL = ("t5-small", "t5-large", "qwen2.5-0.5b", "qwen2.5-1.5b", "gemma3-270m")


@dataclass(frozen=True)
class Finding:
    """What a check found. right: None for a figure that is neither right nor wrong."""

    text: str
    right: bool | None = None


class KernelCheck:
    """The checks of one model.

    make: the model, with random weights. dtype: bfloat16 or float16; float32 in the interpreter.
    """

    def __init__(
        self,
        make: Callable[[], PreTrainedModel],
        device: torch.device,
        dtype: torch.dtype,
        gb_per_s: float,
    ) -> None:
        self.device, self.dtype, self._gb_per_s = device, dtype, gb_per_s
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
        self.kernels = TritonDecoder(self.decoder)
        self.vocab = self.decoder.embedding.shape[0]
        draws = torch.Generator().manual_seed(1)
        self.tokens: list[int] = torch.randint(
            3, self.vocab, (PROMPT + ROOM,), generator=draws
        ).tolist()
        self.source_ids = (
            torch.tensor([self.tokens[-SOURCE:]], device=device)
            if isinstance(self.decoder, T5Decoder)
            else None
        )

    def findings(self, *, times: bool = True) -> Iterator[Finding]:
        """All checks, one after the other. times: time forwards too."""
        yield self.numbers()
        yield self.same_bits()
        yield self.tree_is_chain()
        yield self.texts_side_by_side()
        yield self.resumed_is_straight()
        yield self.program_is_loop()
        yield self.tree_program_is_loop()
        yield self.exit_is_loop()
        yield self.graph_is_eager()
        yield self.overlap_changes_nothing()
        yield self.tickets()
        if times:
            yield from self.times()

    # checks

    @torch.inference_mode()
    def numbers(self) -> Finding:
        """The kernels' error against float32 is that of PyTorch in the same precision."""
        rows = self.tokens[:16]
        exact_decoder = decoder_of(copy.deepcopy(self._module).float())
        exact = self.session(exact_decoder, kernels=False).extend(rows).logits
        del exact_decoder
        errors = [
            float((self.session(self.decoder, kernels).extend(rows).logits - exact).abs().mean())
            for kernels in (False, True)
        ]
        share = errors[1] / max(errors[0], 1e-30)
        right = share <= MOST_ERROR or errors[1] < 1e-4 * float(exact.std())
        return Finding(
            f"mean error against float32 {errors[1]:.2e}, of PyTorch {errors[0]:.2e}", right
        )

    @torch.inference_mode()
    def same_bits(self) -> Finding:
        """A row has the bits that it has alone, whatever number of rows runs."""
        alone = self.session()
        most = max(ROW_COUNTS)
        expected = torch.cat([alone.extend([token]).logits for token in self.tokens[:most]])
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

    @torch.inference_mode()
    def tree_is_chain(self) -> Finding:
        """A branch of a tree has the bits of the chain."""
        first, second, third, sibling, late = self.tokens[:5]
        chain = self.session().extend([first, second, third]).logits
        parents = torch.tensor([-1, 0, 0, 2, 1], device=self.device)
        rows = Rows([first, sibling, second, third, late], Tree(parents))
        branch = self.session().extend(rows).logits[[0, 2, 3]]
        return outcome("a branch of a tree is the chain", torch.equal(branch, chain))

    @torch.inference_mode()
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

    @torch.inference_mode()
    def resumed_is_straight(self) -> Finding:
        """Rows that go on from the states of the first layer have the bits of one forward."""
        depth, rows = len(self.decoder.layers), self.tokens[:5]
        straight = self.session().extend(rows).logits
        session = self.session()
        first = session.extend(rows, OutputSpec(logits=0, layers=range(1), hidden=(1,)))
        rest = OutputSpec(layers=range(1, depth))
        resumed = session.extend(Rows(rows, states=first.hidden[0]), rest).logits
        return outcome("layers in two forwards", torch.equal(resumed, straight))

    @torch.inference_mode()
    def program_is_loop(self) -> Finding:
        """A chain drafted by one program is the loop's, also where a threshold ends it."""
        fed = self.tokens[:2]
        loop, drafted, confidences = self.session(), [], []
        logits = loop.extend(fed).logits[-1:]
        for _ in range(CHAIN_STEPS):
            confidences.append(float(logits.float().softmax(-1).max()))
            drafted.append(int(logits.argmax()))
            logits = loop.extend(drafted[-1:]).logits
        middle = sorted(confidences)[CHAIN_STEPS // 2]
        stop = next(
            index for index, confidence in enumerate(confidences) if confidence < middle * 1.001
        )
        free = self.session().draft(fed, ChainSpec(CHAIN_STEPS, frozenset()))
        ended = self.session().draft(
            fed, ChainSpec(CHAIN_STEPS, frozenset(), threshold=middle * 1.001)
        )
        right = (
            free.tokens == drafted and ended.tokens == drafted[:stop] and ended.forwards == stop + 1
        )
        return outcome(f"a chain of {CHAIN_STEPS} in one program", right)

    @torch.inference_mode()
    def tree_program_is_loop(self) -> Finding:
        """Trees grown by one program are the loop's, also where an end token, a chance or sure rows
        end them; and so are the rows that are kept.
        """
        fed = self.tokens[:2]
        confidence = float(self.session().extend(fed).logits[-1].float().softmax(-1).max())
        first_token = self.grown_by_loop(self.session(), fed, replace(TREE, depth=1)).tokens[0]
        tree_specs = (
            TREE,
            replace(TREE, end_tokens=frozenset([first_token])),
            replace(TREE, min_prob=0.999 * confidence),
            replace(TREE, prune_confidence=0.999 * confidence),
        )
        loop, session = self.session(), self.session()
        start, right = session.length, True
        for tree_spec in tree_specs:
            loop.rollback(start)
            session.rollback(start)
            expected, grown = self.grown_by_loop(loop, fed, tree_spec), session.grow(fed, tree_spec)
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

    @torch.inference_mode()
    def exit_is_loop(self) -> Finding:
        """A row that leaves early in one program is the row that runs layer by layer."""
        program, loop = self.session(), self.session()
        logits, layers = self.leave(program, in_one=True)
        expected, expected_layers = self.leave(loop, in_one=False)
        after = [session.extend(self.tokens[1:2]).logits for session in (program, loop)]
        right = (
            layers == expected_layers
            and torch.equal(logits, expected)
            and torch.equal(after[0], after[1])
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

    @torch.inference_mode()
    def graph_is_eager(self) -> Finding:
        """A replayed graph gives what its kernels give when they are launched one by one."""
        rows = self.tokens[:8]
        replayed = self.session().extend(rows).logits
        captures, self.kernels.graphs.captures = self.kernels.graphs.captures, False
        self.kernels.graphs.clear()
        eager = self.session().extend(rows).logits
        self.kernels.graphs.captures = captures
        self.kernels.graphs.clear()
        return outcome("a graph's replay", torch.equal(replayed, eager))

    @torch.inference_mode()
    def overlap_changes_nothing(self) -> Finding:
        """Kernels that begin while those before them run give what they give in turn."""
        plan = self.kernels.plan
        if not plan.overlap:
            return Finding("kernels run in turn on this GPU")
        spec, rows = ChainSpec(CHAIN_STEPS, frozenset()), self.tokens[:8]
        results = []
        for overlap in (True, False):
            plan.overlap = overlap
            self.kernels.graphs.clear()
            session = self.session()
            logits, chain = session.extend(rows).logits, session.draft(rows[:1], spec)
            results.append((logits, chain.tokens, session.grow(rows[:1], TREE)))
        plan.overlap = True
        self.kernels.graphs.clear()
        right = torch.equal(results[0][0], results[1][0]) and results[0][1:] == results[1][1:]
        return outcome("kernels that overlap", right)

    def tickets(self) -> Finding:
        """No program has kept a ticket."""
        return outcome("tickets", not int(self.kernels.plan.buffers.tickets.abs().sum()))

    # times

    @torch.inference_mode()
    def times(self) -> Iterator[Finding]:
        """Milliseconds of a forward by its number of rows, and of a step of a chain."""
        floor_ms = self.weight_bytes() / self._gb_per_s / 1e6
        session = self.session()
        session.extend(self.tokens[:64])
        while session.length < TIMED_START:
            session.extend(self.tokens[session.length : session.length + 64])
        length = session.length
        milliseconds = {}
        for rows in TIMED_ROWS:
            tokens = torch.tensor(self.tokens[:rows], device=self.device)
            text = session.layers.text_rows(session.layers.reserved + length, rows, rows)
            milliseconds[rows] = self.milliseconds(lambda: self.kernels.run(tokens, [text]))  # noqa: B023
        listed = ", ".join(f"{rows} rows {ms:.3f}" for rows, ms in milliseconds.items())
        yield Finding(
            f"ms a forward: {listed}; floor {floor_ms:.3f} at {self._gb_per_s:,.0f} GB/s,"
            f" {100 * floor_ms / milliseconds[1]:.0f} % of it with one row"
        )
        replay = self.replay_ms(session, length)
        yield Finding(
            f"of these on the GPU with one row {replay:.3f} ms,"
            f" {100 * floor_ms / replay:.0f} % of the floor"
        )
        chains = {
            name: self.milliseconds(lambda: self.draft(session, length, threshold))  # noqa: B023
            for name, threshold in (("all steps", None), ("ended by the first", 2.0))
        }
        per_step = (chains["all steps"] - chains["ended by the first"]) / (CHAIN_STEPS - 1)
        listed = ", ".join(f"{name} {ms:.3f}" for name, ms in chains.items())
        yield Finding(f"ms a chain of {CHAIN_STEPS}: {listed}; {per_step:.3f} more for each step")
        trees = {
            name: self.milliseconds(lambda: self.regrow(grow, session, length))  # noqa: B023
            for name, grow in (
                ("in one program", CachedSession.grow),
                ("by one forward after another", self.grown_by_loop),
            )
        }
        listed = ", ".join(f"{name} {ms:.3f}" for name, ms in trees.items())
        yield Finding(f"ms a tree of {TREE.depth} levels of {TREE.width}: {listed}")
        exits = {
            name: self.milliseconds(lambda: self.leave_again(session, length, in_one))  # noqa: B023
            for name, in_one in (("in one program", True), ("layer by layer", False))
        }
        listed = ", ".join(f"{name} {ms:.3f}" for name, ms in exits.items())
        yield Finding(f"ms a row that leaves early: {listed}")
        plain = self.session(kernels=False)
        plain.extend(self.tokens[:length])
        native = self.milliseconds(lambda: self.rerun(plain, length))
        yield Finding(f"ms a forward by PyTorch, kernel by kernel: {native:.3f}")

    def replay_ms(self, session: CachedSession, length: int) -> float:
        """Milliseconds of one forward's graph of one row, without the host."""
        text = session.layers.text_rows(session.layers.reserved + length, 1, 1)
        self.kernels.run(torch.tensor(self.tokens[:1], device=self.device), [text])

        def replay() -> None:
            for _ in range(REPLAYS):
                self.kernels.graphs.rerun_last()

        return self.milliseconds(replay) / REPLAYS

    def draft(self, session: CachedSession, length: int, threshold: float | None) -> None:
        text = session.layers.text_rows(session.layers.reserved + length, 1, 1)
        chain = ChainSpec(CHAIN_STEPS, frozenset(), threshold)
        self.kernels.draft([self.tokens[:1]], [text], [chain])

    def grown_by_loop(
        self, session: CachedSession, tokens: list[int], tree_spec: TreeSpec
    ) -> GrownTree:
        """A tree that grows by one forward after another."""
        return grow_tree(session, tokens, tree_spec, Sampling())

    def regrow(
        self,
        grow: Callable[[CachedSession, list[int], TreeSpec], GrownTree | None],
        session: CachedSession,
        length: int,
    ) -> None:
        session.rollback(length)
        grow(session, self.tokens[:1], TREE)

    def leave_again(self, session: CachedSession, length: int, in_one: bool) -> None:
        session.rollback(length)
        self.leave(session, in_one)

    def rerun(self, session: CachedSession, length: int) -> None:
        session.rollback(length)
        session.extend(self.tokens[:1])

    def milliseconds(self, work: Callable[[], Any]) -> float:
        """The median of some runs, after as many that are not counted."""
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        for _ in range(3):
            work()
        return 1000 * median_s(work, synchronize, 21)

    def weight_bytes(self) -> int:
        """The bytes of all weights that a token's forward reads, of keys and values none."""
        layer = self.decoder.layers[0]
        matrices = [
            weight.matrix
            for weight in (
                layer.qkv,
                layer.out,
                layer.cross_query,
                layer.cross_out,
                layer.inner,
                layer.outer,
            )
            if weight is not None
        ]
        in_layers = len(self.decoder.layers) * sum(matrix.nbytes for matrix in matrices)
        return in_layers + self.decoder.head.nbytes

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


def decoder_of(module: PreTrainedModel) -> Decoder:
    return (T5Decoder if module.config.is_encoder_decoder else LlamaDecoder)(module)


def outcome(what: str, right: bool) -> Finding:
    return Finding(f"{what}: {'the same bits' if right else 'OTHER BITS'}", right)


def check_all(
    names: Sequence[str], device: torch.device, gb_per_s: float
) -> Iterator[tuple[str, Finding]]:
    """The findings of these models in bfloat16, one model after the other."""
    for name in names:
        check = KernelCheck(MODELS[name], device, torch.bfloat16, gb_per_s)
        for finding in check.findings():
            yield name, finding
        del check
        torch.cuda.empty_cache()
