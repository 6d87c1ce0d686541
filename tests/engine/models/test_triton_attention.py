"""Attention by the Triton kernel, where the chunks of a tree meet those before it: every row has the
bits of a chain's, and no more memory is held than is counted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bild_lab.engine.models.native.attention import KeyValueCache
from bild_lab.engine.models.native.layers import Decoder
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.packed_pass import SequenceSlice
from tests.engine.models.test_native import SIZES, randomized
from tests.engine.models.test_triton import build
from tests.triton_interpreter import interpreter, needs_triton  # noqa: F401

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter", "small_chunks")]

MAP_NORESERVE = 0x4000  # of Linux; not every Python names it
CHUNK = 16  # slots, so that a short text has several chunks
CAPACITY = 64
RESERVED = 3  # slots of a prefix
STARTS = (31, 32, 36)  # of trees: the last slot of a chunk, the first, and one in the middle
PARENTS = (-1, 0, 0, 1, 3, 2, 5)
BRANCHES = ([0, 1, 3, 4], [0, 2, 5, 6])
# more heads of the same keys than a tile has lanes
MANY_HEADS = {
    **SIZES,
    "hidden_size": 48,
    "num_attention_heads": 24,
    "num_key_value_heads": 1,
    "head_dim": 4,
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    set_chunk(monkeypatch, CHUNK)


def set_chunk(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    from bild_lab.engine.models.native.gpu import inputs, plan

    for module in (inputs, plan):
        monkeypatch.setattr(module, "CHUNK", slots)


@cache
def decoder_and_memory(name: str) -> tuple[Decoder, tuple[Tensor, Tensor] | None]:
    """A decoder, and the keys and values of a source if it reads one."""
    if name == "many heads":
        torch.manual_seed(0)
        return LlamaDecoder(randomized(LlamaForCausalLM(LlamaConfig(**MANY_HEADS)))), None
    _, decoder, source = build(name)
    if source.encoder_ids is None:
        return decoder, None
    memory = decoder.encode(source.encoder_ids[0])
    return decoder, (memory.keys, memory.values)


class Texts:
    """Texts of one decoder whose earlier rows are random numbers.

    One layer shows what attention gives; two where one sees a window and the other all.
    """

    def __init__(self, name: str, reserved: int = 0) -> None:
        from bild_lab.engine.models.native.gpu import TritonDecoder

        self.decoder, self._memory = decoder_and_memory(name)
        self.kernels = TritonDecoder(self.decoder)
        if self.kernels.plan.rotary:
            self.kernels.rotate_by(*self.decoder.rotations(CAPACITY))
        self._layers = (1, 2) if name == "gemma3" else (0,)
        self._reserved = reserved
        self._masks = None
        if reserved:
            draws = torch.Generator().manual_seed(1)
            self._masks = torch.randn(2, self.decoder.embedding.shape[1], generator=draws)

    def rows(
        self, seed: int, start: int, count: int, parents: tuple[int, ...] | None = None
    ) -> SequenceSlice:
        """Rows of a text of its own. Slots that no row has written hold NaN."""
        layers, heads, dim = self.decoder.cache_shape
        cache = KeyValueCache((layers, heads, CAPACITY, dim), torch.float32, torch.device("cpu"))
        draws = torch.Generator().manual_seed(seed)
        for store in (cache.keys, cache.values):
            store.normal_(generator=draws)
            store[:, :, start:] = torch.nan
        tree = None if parents is None else torch.tensor(parents)
        return SequenceSlice(count, start, cache, self._memory, count, tree, self._reserved)

    def logits(self, tokens: list[int], texts: list[SequenceSlice]) -> Tensor:
        scores = self.kernels.run(
            torch.tensor(tokens), texts, masks=self._masks, layers=self._layers
        )
        assert int(self.kernels.plan.buffers.tickets.abs().sum()) == 0
        return scores.logits


def require_branches(texts: Texts, start: int, tokens: list[int], found: Tensor) -> None:
    """Every branch of the tree of text 0 has the bits of a chain."""
    for branch in BRANCHES:
        chain = texts.rows(0, start, len(branch))
        expected = texts.logits([tokens[row] for row in branch], [chain])
        assert torch.equal(found[branch], expected)


@pytest.mark.fast("llama-31")
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("name", ["t5 v1.0", "llama", "mistral", "gemma3", "many heads"])
@torch.inference_mode()
def test_rows_of_a_tree_are_those_of_chains_wherever_it_begins(name: str, start: int) -> None:
    texts = Texts(name)
    tokens = [7, 8, 9, 10, 11, 12, 13]
    tree = texts.rows(0, start, len(tokens), PARENTS)
    require_branches(texts, start, tokens, texts.logits(tokens, [tree]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("llama", 31), ("gemma3", 36)])
@torch.inference_mode()
def test_rows_of_a_tree_see_a_prefix_as_those_of_chains(name: str, start: int) -> None:
    texts = Texts(name, RESERVED)
    mask = texts.decoder.embedding.shape[0]
    tokens = [7, 8, mask, 10, mask + 1, mask, 13]
    tree = texts.rows(0, start, len(tokens), PARENTS)
    require_branches(texts, start, tokens, texts.logits(tokens, [tree]))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("t5 v1.0", 31), ("mistral", 36), ("many heads", 32)])
@torch.inference_mode()
def test_trees_and_chains_side_by_side_have_the_bits_that_each_has_alone(
    name: str, start: int
) -> None:
    texts = Texts(name)
    tokens = [[7, 8, 9, 10, 11, 12, 13], [20, 21, 22], [30, 31]]

    def rows() -> list[SequenceSlice]:
        """A tree, a chain over the edge of a chunk, and a tree whose first row ran earlier."""
        later = texts.rows(2, start - 10, 1)
        texts.logits([29], [later])
        return [
            texts.rows(0, start, 7, PARENTS),
            texts.rows(1, 46, 3),
            later._replace(
                count=2, start=later.start + 1, scored=2, parents=torch.tensor([-1, 0, 0])
            ),
        ]

    together = texts.logits([token for fed in tokens for token in fed], rows())
    alone = [texts.logits(fed, [text]) for fed, text in zip(tokens, rows(), strict=True)]
    assert torch.equal(together, torch.cat(alone))
    require_branches(texts, start, tokens[0], together[:7])


@torch.inference_mode()
def test_a_chain_beside_a_tree_sees_the_last_part_of_a_chunk_of_its_cache(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cache may end within a chunk, whose slots only texts without a tree share."""
    monkeypatch.setitem(globals(), "CAPACITY", 3 * CHUNK + 5)
    texts = Texts("llama")
    tree, chain = texts.rows(0, 20, 3, (-1, 0, 0)), texts.rows(1, 3 * CHUNK + 2, 3)
    together = texts.logits([7, 8, 9, 20, 21, 22], [tree, chain])
    alone = texts.logits([20, 21, 22], [texts.rows(1, 3 * CHUNK + 2, 3)])
    assert torch.equal(together[3:], alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma3"])
@torch.inference_mode()
def test_a_window_of_several_chunks_takes_each_query_its_own(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:

    set_chunk(monkeypatch, 4)
    texts = Texts(name)
    tokens = [7, 8, 9, 10, 11, 12, 13]
    tree = texts.rows(0, 30, len(tokens), PARENTS)
    require_branches(texts, 30, tokens, texts.logits(tokens, [tree]))


@pytest.mark.slow
@torch.inference_mode()
def test_a_deep_tree_has_rows_in_several_chunks() -> None:
    texts = Texts("llama")
    tokens = [5 + row for row in range(40)]
    parents = (*range(-1, 38), 3)  # a chain, and a late row near its root
    found = texts.logits(tokens, [texts.rows(0, 20, 40, parents)])
    chain = texts.logits(tokens[:39], [texts.rows(0, 20, 39)])
    assert torch.equal(found[:39], chain)
    branch = texts.logits([*tokens[:4], tokens[39]], [texts.rows(0, 20, 5)])
    assert torch.equal(found[39:], branch[4:])


@torch.inference_mode()
def test_partial_results_of_a_text_of_millions_of_tokens_lie_where_they_should(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their places are larger than numbers of 32 bits. Memory that nobody touches takes no room."""
    from triton.runtime.interpreter import interpreter_builder

    from bild_lab.engine.models.native.gpu.attention import attend
    from bild_lab.engine.models.native.gpu.plan import ForwardPlan, Launch

    texts = Texts("llama")
    row = texts.rows(0, 3 * CHUNK, 1)
    expected = texts.logits([7], [row])
    plan, many_chunks = texts.kernels.plan, 2**20
    results = 64 * plan.stack.heads * many_chunks * plan.head_block
    assert results > 2**31
    bytes_held = 4 * (results + 2 * 64 * plan.stack.heads * many_chunks)
    reserved = mmap(-1, bytes_held, flags=MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE)
    memory = torch.frombuffer(reserved, dtype=torch.float32)
    sized, launches = ForwardPlan.sized, ForwardPlan.launches

    def with_few_programs(launch: Launch) -> Launch:
        """Without those that have no chunk."""
        grid = (4, plan.stack.kv_heads) if launch.kernel is attend else launch.grid
        return replace(launch, grid=grid)

    monkeypatch.setattr(
        ForwardPlan, "sized", lambda *parts: sized(*parts)._replace(chunks=many_chunks)
    )
    monkeypatch.setattr(
        ForwardPlan, "launches", lambda *parts: [*map(with_few_programs, launches(*parts))]
    )
    monkeypatch.setattr(
        ForwardPlan, "partial_results", lambda plan, chunks: (memory, memory[results:])
    )

    checked = replace(interpreter_builder.options, debug=True, sanitize_overflow=True)
    monkeypatch.setattr(interpreter_builder, "options", checked)
    assert torch.equal(texts.logits([7], [texts.rows(0, 3 * CHUNK, 1)]), expected)


def test_partial_results_take_no_more_than_is_counted() -> None:
    plan = Texts("llama").kernels.plan
    held = {}
    for chunks in (1, 2, 4, 8, 2):  # a graph keeps what it was made with
        partial, statistics = plan.partial_results(chunks)
        held[partial.data_ptr()] = partial
        assert partial.shape[0] - statistics.shape[0] == 64 * 4 * chunks * plan.head_block
        assert statistics.shape[0] >= 64 * 4 * chunks * 2
    assert sum(partial.nbytes for partial in held.values()) <= plan.buffer_bytes(8 * CHUNK)
