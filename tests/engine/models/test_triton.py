"""The Triton kernels, by Triton's interpreter: they are PyTorch's numbers, a row has the bits that
it has alone, and a program drafts what the loop does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from bild_lab.engine.draft import Tree
from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.cached_session import CachedSession
from bild_lab.engine.models.native.layers import Decoder
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.request import Source
from bild_lab.engine.session import ChainSpec, OutputSpec, Prefix, Rows, Skipped, TreeSpec
from tests.engine.models.test_native import ARCHITECTURES, GEMMA3, SIZES, WINDOWS, randomized
from tests.sessions import native_session, tree_rows
from tests.triton_interpreter import (
    interpreter,  # noqa: F401
    needs_triton,
    tilings,
    triton_session,
)

if TYPE_CHECKING:
    from bild_lab.engine.models.native.gpu.tilings import Tiling

pytestmark = [needs_triton, pytest.mark.usefixtures("interpreter")]

NO_CHANGES: Mapping[str, int] = MappingProxyType({})
# a tile is one head where heads are normed, so these have a power of two of columns
MODELS = {
    name: make for name, make in ARCHITECTURES.items() if not name.startswith(("qwen3", "gemma3"))
} | {
    "qwen3 windows": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, **WINDOWS["late"], head_dim=16, attention_bias=True)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**{**GEMMA3, "head_dim": 16})),
}


def build(
    name: str, dtype: torch.dtype = torch.float32, sizes: Mapping[str, int] = NO_CHANGES
) -> tuple[PreTrainedModel, Decoder, Source]:
    """A model with random weights. sizes: of its configuration, where it has them, instead."""
    torch.manual_seed(0)
    module = MODELS[name]()
    if sizes:
        changes = {key: value for key, value in sizes.items() if hasattr(module.config, key)}
        config = copy.deepcopy(module.config)
        config.update(changes)
        module = type(module)(config)
    module = randomized(module).to(dtype)
    ids = torch.randint(3, 90, (1, 7))
    if module.config.is_encoder_decoder:
        return module, T5Decoder(module), Source((0,), ids)
    return module, LlamaDecoder(module), Source(tuple(ids[0].tolist()))


def close(found: Tensor, expected: Tensor, share: float = 1e-4) -> bool:
    """Whether numbers differ by at most this share of their spread."""
    return float((found - expected).abs().max()) < share * float(expected.std())


def tickets_left(session: CachedSession) -> int:
    """Tickets that no program has given back."""
    return int(session.layers.packed.plan.buffers.tickets.sum())


@pytest.mark.fast("t5 v1.0", "qwen3 windows", "gemma3")
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_logits_are_those_of_pytorch(name: str) -> None:
    _, decoder, source = build(name)
    tokens = [source.prompt[-1], *torch.randint(3, 90, (14,)).tolist()]  # more than a window
    expected = native_session(decoder, source, 64).extend(tokens).logits
    session = triton_session(decoder, source, 64)
    pieces = [session.extend(rows).logits for rows in (tokens[:4], tokens[4:5], tokens[5:])]
    assert close(torch.cat(pieces), expected)
    assert tickets_left(session) == 0


def variants() -> dict[str, tuple[Tiling, Tiling]]:
    """Tilings of every kind, and one for products whose tile is a head of 16."""
    from bild_lab.engine.models.native.gpu.tilings import resident, streaming

    return {
        "resident": (resident(32, 32, 2, 2), streaming(16, 16, 1, 2, 2)),
        "resident, split": (resident(32, 16, 2, 2, split=2), streaming(16, 16, 1, 2, 2, 2)),
        "by ways": (streaming(16, 16, 2, 2, 2), streaming(16, 16, 2, 2, 2)),
        "by ways, split": (streaming(32, 16, 2, 2, 2, split=2), streaming(16, 16, 1, 2, 3, 2)),
        "streaming, split": (streaming(32, 16, 1, 2, 2, split=3), streaming(16, 16, 1, 2, 2, 2)),
    }


KINDS = ("resident", "resident, split", "by ways", "by ways, split", "streaming, split")


@pytest.mark.fast("t5 v1.0-by ways, split")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["t5 v1.0", "qwen3 windows"])
@torch.inference_mode()
def test_every_tiling_gives_the_same_numbers_and_returns_its_tickets(name: str, kind: str) -> None:
    _, decoder, source = build(name)
    tokens = [source.prompt[-1], 5, 6]
    expected = native_session(decoder, source, 64).extend(tokens).logits
    wide = max(
        weight.matrix.shape[1] for weight in (decoder.layers[0].outer, decoder.layers[0].out)
    )
    tiling, head_tiling = variants()[kind]
    if tiling.resident:  # it covers all inputs
        while tiling.ways * tiling.block_k * tiling.split < wide:
            tiling = tiling._replace(block_k=2 * tiling.block_k)
    with tilings(tiling, head_tiling):
        session = triton_session(decoder, source, 64)
        alone = torch.cat([session.extend([token]).logits for token in tokens])
        together = triton_session(decoder, source, 64).extend(tokens).logits
    assert close(together, expected)
    assert torch.equal(alone, together)
    assert tickets_left(session) == 0


@pytest.mark.fast("t5 v1.0")
@pytest.mark.parametrize("name", ["t5 v1.0", "mt5", "llama", "mistral", "qwen3 windows", "gemma3"])
@torch.inference_mode()
def test_a_row_is_the_same_to_the_last_bit_whatever_runs_beside_it(name: str) -> None:
    _, decoder, source = build(name, torch.float16 if name != "mt5" else torch.float32)
    new = [source.prompt[-1], *torch.randint(3, 90, (5,)).tolist()]
    alone = triton_session(decoder, source, 64)
    expected = torch.cat([alone.extend([token]).logits for token in new])
    together = triton_session(decoder, source, 64, like=alone)
    for store in (together.layers.cache.keys, together.layers.cache.values):
        store.fill_(torch.nan)  # slots that no row has written are not read
    rows = [together.extend(rows).logits for rows in (new[:2], new[2:])]
    assert torch.equal(torch.cat(rows), expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["t5 v1.0", "qwen3 windows"])
@torch.inference_mode()
def test_more_rows_than_a_forward_has_run_as_several(name: str) -> None:
    _, decoder, source = build(name, torch.float16)
    new = [source.prompt[-1], *torch.randint(3, 90, (79,)).tolist()]
    alone = triton_session(decoder, source, 128)
    expected = torch.cat([alone.extend(new[start : start + 8]).logits for start in range(0, 80, 8)])
    together = triton_session(decoder, source, 128, like=alone)
    assert torch.equal(together.extend(new).logits, expected)


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", ["t5 v1.0", "llama", "gemma3"])
@torch.inference_mode()
def test_texts_side_by_side_have_the_bits_that_each_has_alone(name: str) -> None:
    _, decoder, source = build(name, torch.float16)
    other = Source(source.prompt[:4], source.encoder_ids)
    if source.encoder_ids is not None:
        other = Source(source.prompt, source.encoder_ids[:, :4])
    first = triton_session(decoder, source, 64)
    second = triton_session(decoder, other, 64, like=first)
    expected = [first.extend([7, 8, 9]).logits, second.extend([5]).logits]
    texts = [
        session.layers.text_rows(session.length, count, scored=count)
        for session, count in ((first, 2), (second, 3))
    ]
    tokens = torch.tensor([10, 11, 20, 21, 22])
    scores = first.layers.packed.run(tokens, texts).logits
    assert torch.equal(scores[:2], first.extend([10, 11]).logits)
    assert torch.equal(scores[2:], second.extend([20, 21, 22]).logits)
    assert all(logits.isfinite().all() for logits in expected)


@pytest.mark.fast("t5 v1.0")
@pytest.mark.parametrize("name", ["t5 v1.0", "llama", "mistral", "gemma3"])
@torch.inference_mode()
def test_a_branch_of_a_tree_is_a_chain_to_the_last_bit(name: str) -> None:
    _, decoder, source = build(name)  # float32, as rounding hides other orders of a sum
    first = source.prompt[-1]
    chain = triton_session(decoder, source, 64)
    expected = chain.extend([first, 7, 8, 20]).logits
    tree = triton_session(decoder, source, 64, like=chain)
    parents = torch.tensor([-1, 0, 0, 1, 2, 4])
    # its last rows run later: a tree may grow
    tree.extend(tree_rows([first, 6, 7], parents[:3]))
    start = tree.length - 3
    later = Rows([30, 8, 20], Tree(parents), position=None)
    logits = tree.extend(later).logits
    assert torch.equal(logits[1:], expected[2:])
    tree.keep([0, 2, 4, 5])
    assert tree.length == start + 4
    assert torch.equal(tree.extend([21]).logits, chain.extend([21]).logits)


@pytest.mark.fast("mt5")
@pytest.mark.parametrize("name", ["mt5", "llama", "mistral", "gemma3"])
@torch.inference_mode()
def test_a_prefix_is_seen_by_its_masks_alone(name: str) -> None:
    _, decoder, source = build(name)
    layers, heads, dim = decoder.cache_shape
    random = torch.Generator().manual_seed(2)
    keys, values = torch.randn(2, layers, heads, 5, dim, generator=random)
    masks = torch.randn(2, decoder.embedding.shape[1], generator=random)
    prefix = Prefix(keys, values, masks)
    vocabulary = decoder.embedding.shape[0]
    tokens = [source.prompt[-1], 5, 6, vocabulary, vocabulary + 1]
    expected = native_session(decoder, source, 64, prefix).extend(tokens).logits
    assert close(triton_session(decoder, source, 64, prefix).extend(tokens).logits, expected)


@pytest.mark.fast("t5 v1.1")
@pytest.mark.parametrize("name", ["t5 v1.1", "llama with biases", "qwen2 windows", "gemma3"])
@torch.inference_mode()
def test_ranges_of_layers_are_as_on_pytorch(name: str) -> None:
    _, decoder, source = build(name)
    sessions = [make(decoder, source, 64) for make in (native_session, triton_session)]
    depth = len(decoder.layers)
    first, rest = range(1), range(1, depth)
    tokens = [source.prompt[-1], 5, 6]
    # 1. the first layer, with its output, and the head's scores of it
    early = [
        session.extend(tokens, OutputSpec(layers=first, hidden=(0, 1), head_input=True))
        for session in sessions
    ]
    for found, expected in zip(early[1].hidden, early[0].hidden, strict=True):
        assert close(found, expected)
    assert close(early[1].logits, early[0].logits)
    assert close(early[1].head_input, early[0].head_input)
    # 2. the other layers, from its output
    late = [
        session.extend(
            Rows(tokens, states=scores.hidden[1][-3:]), OutputSpec(layers=rest, hidden=(depth,))
        )
        for session, scores in zip(sessions, early, strict=True)
    ]
    assert close(late[1].logits, late[0].logits)
    assert close(late[1].hidden[0], late[0].hidden[0])
    # 3. a row that leaves after the first layer: only keys and values of the others
    for session in sessions:
        row = session.extend([7], OutputSpec(layers=first, hidden=(1,)))
        session.extend(
            Rows([7], states=row.hidden[0]), OutputSpec(logits=0, layers=rest, fill=True)
        )
    after = [session.extend([8]).logits for session in sessions]
    assert close(after[1], after[0])
    # 4. blocks that are left out, of drafted rows
    skipped = Skipped(attention=frozenset({0}), feed_forward=frozenset({depth - 1}))
    output_spec = OutputSpec(layers=range(depth), skipped=skipped)
    drafted = [
        session.extend(Rows([9, 10], position=session.length), output_spec).logits
        for session in sessions
    ]
    assert close(drafted[1], drafted[0])


@torch.inference_mode()
def test_a_draft_vocabulary_scores_its_tokens_alone() -> None:
    _, decoder, source = build("llama")
    for tokens in (range(5, 40, 3), range(1, 90)):  # a head of its own, and the whole one
        output_spec = OutputSpec(vocabulary=DraftVocabulary(tokens))
        expected, found = (
            make(decoder, source, 64).extend([5, 6], output_spec).logits
            for make in (native_session, triton_session)
        )
        inside = expected > float("-inf")
        assert torch.equal(found > float("-inf"), inside)
        assert close(found[inside], expected[inside])


def chains(
    session: CachedSession, tokens: list[int], chain: ChainSpec
) -> tuple[list[int], list[float]]:
    """The tokens of a chain that is drafted by one forward after another, and each confidence."""
    drafted: list[int] = []
    confidences: list[float] = []
    logits = session.extend(tokens).logits[-1:]
    while True:
        probs = logits.float().softmax(-1)
        confidences.append(float(probs.max()))
        if chain.threshold is not None and confidences[-1] < chain.threshold:
            break
        drafted.append(int(logits.argmax()))
        if drafted[-1] in chain.end_tokens or len(drafted) == chain.steps:
            break
        logits = session.extend(drafted[-1:]).logits
    return drafted, confidences


@pytest.mark.fast("llama")
@pytest.mark.parametrize("name", ["t5 v1.0", "llama", "gemma3"])
@torch.inference_mode()
def test_a_program_drafts_the_chain_that_the_loop_does(name: str) -> None:
    _, decoder, source = build(name, torch.float16)
    tokens = [source.prompt[-1], 7]
    free = ChainSpec(4, frozenset())
    loop = triton_session(decoder, source, 64)
    drafted, confidences = chains(loop, tokens, free)
    # an end token in the middle, and a threshold between two confidences
    ends = replace(free, end_tokens=frozenset({drafted[1]}))
    threshold = sorted(confidences)[1]
    for chain in (ends, replace(free, threshold=threshold)):
        expected, measured = chains(triton_session(decoder, source, 64, like=loop), tokens, chain)
        session = triton_session(decoder, source, 64, like=loop)
        result = session.draft(tokens, chain)
        assert result.tokens == expected
        assert result.forwards == len(measured)
        assert result.fallback == (len(measured) > len(expected))
        assert tickets_left(session) == 0


@pytest.mark.parametrize("length", [64, 65, 80])
@torch.inference_mode()
def test_a_text_drafts_by_a_program_from_its_first_draft_on(length: int) -> None:
    """A prompt that is longer than a program's first forward runs before it."""
    _, decoder, source = build("llama", torch.float16)
    prompt = tuple((source.prompt * length)[:length])
    chain = ChainSpec(4, frozenset(), threshold=0.0)
    loop = triton_session(decoder, Source(prompt), 64)
    expected, confidences = chains(loop, [prompt[-1]], chain)
    for grows in (False, True):
        session = triton_session(decoder, Source(prompt), 64, like=loop)
        if grows:
            tree = session.draft([prompt[-1]], TreeSpec(4, 2, 2, 2, frozenset()))
            assert tree is not None
        else:
            found = session.draft([prompt[-1]], chain)
            assert found.tokens == expected
            assert found.confidences == pytest.approx(confidences, rel=1e-3)
        prompts = [forward.rows for forward in session.forwards][:2]
        assert prompts[0] == (length if length <= 64 else length - 1)


@torch.inference_mode()
def test_kernels_of_a_chain_that_has_ended_do_nothing() -> None:
    _, decoder, source = build("llama", torch.float16)
    session = triton_session(decoder, source, 64)
    result = session.draft([5], ChainSpec(6, frozenset(), threshold=1.1))
    assert (result.tokens, result.forwards, result.fallback) == ([], 1, True)
    keys = session.layers.cache.keys
    written = keys.abs().sum((0, 1, 3)) > 0
    assert int(written.sum()) == len(source.prompt)


@pytest.mark.slow
@torch.inference_mode()
def test_texts_draft_side_by_side_what_each_drafts_alone() -> None:
    _, decoder, source = build("llama", torch.float16)
    sources = [source, Source(source.prompt[:4]), Source(source.prompt[3:])]
    specs = [ChainSpec(4, frozenset()), ChainSpec(2, frozenset()), ChainSpec(4, frozenset(), 0.06)]
    first = triton_session(decoder, source, 64)
    sessions = [triton_session(decoder, each, 64, like=first) for each in sources]
    expected = [
        triton_session(decoder, each, 64, like=first).draft([each.prompt[-1]], spec)
        for each, spec in zip(sources, specs, strict=True)
    ]
    tokens = [list(each.prompt) for each in sources]
    texts = [
        session.layers.text_rows(0, len(rows))
        for session, rows in zip(sessions, tokens, strict=True)
    ]
    results = first.layers.packed.draft(tokens, texts, specs)
    for found, alone in zip(results, expected, strict=True):
        assert (found.tokens, found.forwards, found.fallback) == (
            alone.tokens,
            alone.forwards,
            alone.fallback,
        )
        assert found.confidences == alone.confidences


@torch.inference_mode()
def test_a_chain_without_a_program_leaves_the_others_theirs() -> None:
    """A text drafts what it drafts alone, whoever stands beside it: chains that are drawn otherwise
    are another program.
    """
    _, decoder, source = build("llama", torch.float16)
    first = triton_session(decoder, source, 64)
    first.extend([5])  # makes the rotations
    fed = [list(source.prompt), [5] * 65, list(source.prompt), list(source.prompt[2:]), [6]]
    plain = ChainSpec(2, frozenset(), threshold=0.0)
    drawn = replace(plain, temperature=0.7, uniforms=torch.tensor([0.2, 0.9]))
    too_long = replace(plain, steps=65)
    chains = [plain, plain, drawn, plain, too_long]

    def drafted(places: list[int]) -> list[tuple[list[int], list[float]] | None]:
        sessions = [triton_session(decoder, source, 64, like=first) for _ in places]
        texts = [
            session.layers.text_rows(0, len(fed[place]))
            for session, place in zip(sessions, places, strict=True)
        ]
        results = first.layers.packed.draft(
            [fed[place] for place in places], texts, [chains[place] for place in places]
        )
        return [
            None if result is None else (result.tokens, result.confidences) for result in results
        ]

    together = drafted([0, 1, 2, 3, 4])
    assert together == [drafted([place])[0] for place in range(5)]
    assert [result is None for result in together] == [False, True, False, False, True]


@torch.inference_mode()
def test_a_batch_that_loses_a_text_keeps_its_graph() -> None:
    """The places of texts that are gone have no chain, whatever was there before."""
    _, decoder, source = build("llama", torch.float16)
    first = triton_session(decoder, source, 64)
    first.extend([5])  # makes the rotations
    packed, chain = first.layers.packed, ChainSpec(3, frozenset(), threshold=0.0)
    found, made = [], []
    for count in (4, 3, 1):
        sessions = [triton_session(decoder, source, 64, like=first) for _ in range(count)]
        texts = [session.layers.text_rows(0, 1) for session in sessions]
        results = packed.draft([[7 + index] for index in range(count)], texts, [chain] * count)
        found.append([(result.tokens, result.confidences) for result in results])
        made.append(packed.graphs.made)
        assert int(packed.plan.buffers.running) == 0
    assert found[0][:3] == found[1] and found[1][:1] == found[2]
    assert made[0] == made[1] == made[2] - 1


def test_distributions_of_all_shapes_share_their_memory() -> None:
    from bild_lab.engine.models.native.gpu.chains import KeptProbs  # late: needs Triton

    kept = KeptProbs(torch.device("cpu"))
    places = {texts: kept.of(4, texts, 100) for texts in range(1, 33)}
    pieces = {place.untyped_storage() for place in places.values()}
    sizes = {piece.data_ptr(): piece.nbytes() for piece in pieces}
    largest = places[32].numel() * places[32].element_size()
    assert sum(sizes.values()) <= 4 * largest
    # graphs write where they did when they were made
    assert all(kept.of(4, texts, 100) is place for texts, place in places.items())
    # a batch that begins with its most texts has one piece
    kept = KeptProbs(torch.device("cpu"))
    pieces = {kept.of(4, texts, 100).untyped_storage().data_ptr() for texts in range(32, 0, -1)}
    assert len(pieces) == 1


@torch.inference_mode()
def test_a_drawn_chain_finds_its_distributions_after_a_longer_one() -> None:
    _, decoder, source = build("llama", torch.float16)
    uniforms = torch.tensor([0.2, 0.9, 0.4])
    chain = ChainSpec(1, frozenset(), None, 0.7, uniforms[:1], keeps_probs=True)
    session = triton_session(decoder, source, 64)
    expected = session.draft([source.prompt[-1]], chain)
    triton_session(decoder, source, 64, like=session).draft(
        [7], replace(chain, steps=3, uniforms=uniforms)
    )
    again = triton_session(decoder, source, 64, like=session).draft([source.prompt[-1]], chain)
    assert torch.equal(again.probs, expected.probs)
    assert torch.equal(again.unscaled_probs, expected.unscaled_probs)


@pytest.mark.slow
@torch.inference_mode()
def test_a_drawn_chain_has_its_distributions() -> None:
    _, decoder, source = build("llama", torch.float16)
    uniforms = torch.rand(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    vocabulary = DraftVocabulary(range(5, 40, 3))
    for chain in (
        ChainSpec(4, frozenset(), 0.0, 0.7, uniforms, keeps_probs=True),
        ChainSpec(4, frozenset(), None, 1.3, uniforms, vocabulary=vocabulary),
    ):
        session = triton_session(decoder, source, 64)
        result = session.draft([source.prompt[-1]], chain)
        loop = triton_session(decoder, source, 64, like=session)
        fed, probs = [source.prompt[-1]], []
        for token in result.tokens:
            logits = loop.extend(fed, OutputSpec(logits=1, vocabulary=chain.vocabulary)).logits
            probs.append((logits / chain.temperature).softmax(-1))
            fed = [token]
        assert torch.allclose(result.probs, torch.cat(probs), atol=1e-6)
        if chain.vocabulary is not None:
            assert set(result.tokens) <= set(chain.vocabulary.tokens.tolist())
        else:
            assert result.unscaled_probs.shape == result.probs.shape
