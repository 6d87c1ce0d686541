"""What is decoded over a record is what the models decode live: tokens, counts and forwards."""

from __future__ import annotations

import copy
import gc
import random
import weakref
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, NoRepeatNGramLogitsProcessor

from bild_lab.engine.batch_scheduler import Batch
from bild_lab.engine.draft import Tree
from bild_lab.engine.methods.early_exit.views import LayerView
from bild_lab.engine.protocols import Method
from bild_lab.engine.request import Limits, Request, Source
from bild_lab.engine.session import (
    LAST_LOGITS,
    NOTHING,
    Prefix,
    Rows,
    Scores,
    SessionOptions,
)
from bild_lab.engine.trace import Forward, Round, Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import policy_names
from bild_lab.lab.point.build import build_method
from bild_lab.screening.record_store import BLOCKS, RecordStore
from bild_lab.screening.recorded_model import RecordedModel
from bild_lab.screening.recorded_text import HEAD_INPUT, LOGITS, STATE, RecordedText
from tests.engine.lossless.greedy import emitted, table_of
from tests.engine.lossless.random_models import random_source
from tests.engine.methods.modules.tiny import files_of
from tests.policies import (
    EXTERNAL,
    FAMILIES,
    REFUSED,
    REPLAYED,
    SERVER,
    in_memory,
    is_peer,
    shipped,
)
from tests.sessions import needs_kernels
from tests.tiny import TINY, relative_of

KNOBS: dict[str, Callable[[random.Random], Any]] = {
    "fallback": lambda chance: chance.uniform(0, 1),
    "rollback": lambda chance: chance.choice([0.1, 0.5, 1.0, 2.0, 4.0, 9.0]),
    "window": lambda chance: chance.randint(1, 8),
    "inner_window": lambda chance: chance.randint(1, 4),
    "max_window": lambda chance: chance.randint(1, 8),
    "verify_tail": lambda chance: chance.random() < 0.5,
    "lenience": lambda chance: chance.choice([1.0, 0.5, 0.1]),
    "stop_confidence": lambda chance: chance.choice([None, 0.3, 0.7]),
    "threshold": lambda chance: chance.random(),
    "weight": lambda chance: chance.random(),
    "ratio": lambda chance: chance.choice([0.05, 0.3, 0.8]),
    "epsilon": lambda chance: chance.choice([0.01, 0.1, 0.5]),
    "delta": lambda chance: chance.choice([0.1, 0.5, 1.0]),
    "rule": lambda chance: chance.choice(
        ["chow", "diff", "opt", "token_v1", "token_v2", "token_v3"]
    ),
    "alpha": lambda chance: chance.uniform(-0.2, 0.5),
    "nodes": lambda chance: chance.randint(1, 15),
    "width": lambda chance: chance.randint(1, 4),
    "children": lambda chance: chance.randint(1, 3),
    "min_prob": lambda chance: chance.choice([0.0, 0.05, 0.3]),
    "exit_layer": lambda chance: chance.randint(1, 2),
    "skipped_layers": lambda chance: chance.choice([[0], [1], [1, 2]]),
    "skipped_attention": lambda chance: chance.choice([[], [0]]),
    "skipped_feed_forward": lambda chance: chance.choice([[], [2]]),
    "ngram": lambda chance: chance.randint(2, 4),
    "guesses": lambda chance: chance.randint(1, 4),
    "factor": lambda chance: chance.choice([1, 2, 4]),
    "min_depth": lambda chance: chance.randint(1, 3),
    "acceptance_rate": lambda chance: chance.random(),
    "longest_match": lambda chance: chance.randint(1, 3),
    "cost_ratio": lambda chance: chance.uniform(0.01, 0.5),
    "top_k": lambda chance: chance.randint(1, 4),
}
STATES = ("calm", "dflash", "eagle", "eagle3", "mtp", "ppd")  # read states inside the model
RECORDED = [
    one
    for one in policy_names()
    if one not in (*EXTERNAL, REPLAYED, SERVER, *STATES) and not is_peer(one)
]
Models = tuple[Any, Any, Any]


@cache
def models(family: str, engine: str) -> Models:
    """A target and two relatives that draft for it, in float32."""
    target = TINY[family](5, layers=3)
    return tuple(
        in_memory(one, engine)
        for one in (target, relative_of(target, 6, 0.1), relative_of(target, 7, 0.3))
    )


def method_of(
    policy: str, chance: random.Random, three: Models, folder: Path
) -> tuple[Method, Method]:
    """A policy with random knobs, on the models and on their records."""
    node = copy.deepcopy(shipped(policy))
    for knob in node:
        if knob in KNOBS:
            node[knob] = KNOBS[knob](chance)
    if "table" in node:
        node.table = str(folder / "table.safetensors")
        table_of([[2, 5, 9, 5, 9, 7], [0, 8, 8, 5, 9]], three[0], Path(node.table))
    node.update(files_of(policy, three[0].checkpoint.config, folder))
    return node


def built(node: Any, three: Models) -> Method:
    names = ("target", "draft", "second_draft")
    return build_method(
        node, {name: lambda one=one: one for name, one in zip(names, three, strict=True)}
    )


def counted(trace: Trace, engine: str) -> tuple[list[Any], list[Any]]:
    """The rounds without their statistics, but for the fallback, and the forwards without the
    model's configuration.

    Transformers may run its head for more rows than those asked for.
    """

    def plain(one: Round) -> tuple[Any, ...]:
        return (
            one.drafted,
            one.accepted,
            one.next_token,
            one.draft_calls,
            one.branch,
            one.stats.get("fallback"),
        )

    def shape(one: Forward) -> tuple[Any, ...]:
        return astuple(replace(one, config=None, **({"scored": 0} if engine == "hf" else {})))  # type: ignore[arg-type]

    return [plain(one) for one in trace.rounds], [shape(one) for one in trace.forwards]


def compare(
    policy: str,
    family: str,
    engine: str,
    settings: int,
    folder: Path,
    recorded: Models | None = None,
) -> None:
    """Decode random texts with random knobs, live and over one record."""
    live = models(family, engine)
    recorded = recorded or tuple(map(RecordedModel, live))
    chance = random.Random(f"{policy} {family}")
    sources = [random_source(family, chance) for _ in range(2)]
    for _ in range(settings):
        node = method_of(policy, chance, live, folder)
        methods = built(node, live), built(node, recorded)
        for source in sources:
            limits = Limits(len(source.prompt), chance.randint(8, 20))
            text = emitted(built(shipped("vanilla"), live), Request(source, limits), Trace())
            request = Request(source, replace(limits, end_tokens=frozenset([chance.choice(text)])))
            traces = Trace(), Trace()
            texts = [
                emitted(one, request, trace) for one, trace in zip(methods, traces, strict=True)
            ]
            assert texts[0] == texts[1], (policy, node)
            assert counted(traces[0], engine) == counted(traces[1], engine), (policy, node)


def compare_families(policy: str, engine: str, settings: int, folder: Path) -> None:
    for family in FAMILIES:
        if (policy, family) not in REFUSED:
            compare(policy, family, engine, settings, folder)


@pytest.mark.fast(
    "native-bild",
    "hf-suffix",
    "kernels-bild_tree",
    "kernels-block_verification",
    "kernels-early_exit_speculative",
    "kernels-medusa",
    "kernels-static_ensemble",
)
@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        *product(("native", "hf"), RECORDED),
        *(pytest.param("kernels", policy, marks=needs_kernels) for policy in RECORDED),
    ],
)
def test_what_is_decoded_over_a_record_is_what_is_decoded_live(
    policy: str, engine: str, tmp_path: Path
) -> None:
    compare_families(policy, engine, 2 if engine == "kernels" else 1, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["native", "hf", pytest.param("kernels", marks=needs_kernels)])
@pytest.mark.parametrize("policy", RECORDED)
def test_thirty_settings_of_every_policy_are_decoded_as_live(
    policy: str, engine: str, tmp_path: Path
) -> None:
    compare_families(policy, engine, 30, tmp_path)


@pytest.mark.fast("llama")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_serves_decoding_with_processors_and_without(family: str) -> None:
    live = models(family, "native")
    recorded = tuple(map(RecordedModel, live))
    plain = random_source(family, random.Random(3))
    processed = replace(plain, processors=LogitsProcessorList([NoRepeatNGramLogitsProcessor(1)]))
    texts = []
    for source in (plain, processed, plain):
        request = Request(source, Limits(len(source.prompt), 20))
        methods = (built(shipped("bild"), three) for three in (live, recorded))
        texts += [emitted(one, request, Trace()) for one in methods]
    assert texts[::2] == texts[1::2]
    assert texts[0] != texts[2]


def recorded(
    family: str,
    folder: Path,
    engine: str = "native",
    memory_bytes: float = 1e9,
    disk_bytes: float = inf,
) -> Models:
    """Records on disk of an engine's models."""
    three = models(family, engine)
    return tuple(
        RecordedModel(
            one, RecordStore(folder / str(place), {"model": place}, disk_bytes), memory_bytes
        )
        for place, one in enumerate(three)
    )


def texts_of(model: RecordedModel) -> dict[str, RecordedText]:
    """The texts that were asked for and not saved, by name."""
    return {name: text for texts in model._texts.values() for name, text in texts.items()}


def kinds_of(model: RecordedModel) -> set[str]:
    """Of all rows in its texts."""
    return {kind for text in texts_of(model).values() for node in text.nodes for kind in node.rows}


def decode_twice(policy: str, family: str, engine: str, folder: Path) -> list[str]:
    """Decode over a record, save it, and decode over what was saved, as live and without a forward.

    Every row read again has the bits of the row that was recorded. Returns the kinds under which
    rows are saved.
    """
    first = recorded(family, folder, engine)
    compare(policy, family, engine, 2, folder, first)
    rows = [
        {name: [dict(node.rows) for node in text.nodes] for name, text in texts_of(one).items()}
        for one in first
    ]
    for one in first:
        one.save()
    again = recorded(family, folder, engine)
    compare(policy, family, engine, 2, folder, again)
    kinds, ran = [], []
    for recorded_rows, other in zip(rows, again, strict=True):
        for name, text in texts_of(other).items():
            kinds += [entry.kind for block in other.store.read(name) for entry in block]
            ran.append(text.forwards.total())
            for before, node in zip(recorded_rows[name], text.nodes, strict=True):
                for kind in before.keys() & node.rows.keys():
                    assert torch.equal(before[kind], node.rows[kind]), (policy, kind)
    assert ran and not any(ran)
    return kinds


@pytest.mark.fast("llama-native")
@pytest.mark.parametrize("engine", ["native", pytest.param("kernels", marks=needs_kernels)])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_record_that_was_saved_serves_every_row_without_a_forward(
    family: str, engine: str, tmp_path: Path
) -> None:
    for policy in ("bild", "speculative_tree", "bild_early_exit"):
        kinds = decode_twice(policy, family, engine, tmp_path / policy)
        assert all(kind.startswith(STATE) == (engine == "kernels") for kind in kinds), (
            "rows were saved otherwise"
        )


@pytest.mark.fast("unlimited-native")
@pytest.mark.parametrize("engine", ["native", pytest.param("kernels", marks=needs_kernels)])
@pytest.mark.parametrize("disk_bytes", [inf, 1], ids=["unlimited", "filled by the first rows"])
def test_rows_beyond_their_share_of_memory_lie_on_the_disk(
    engine: str, disk_bytes: float, tmp_path: Path
) -> None:
    """Every call has its rows saved and taken out of memory."""
    for policy in ("bild", "speculative_tree", "bild_early_exit"):
        folder = tmp_path / policy
        first = recorded("llama", folder, engine, 1, disk_bytes)
        compare(policy, "llama", engine, 2, tmp_path, first)
        begun = [
            [name for name in texts_of(one) if one.store.block_count(name)]
            for one in first
            if one._texts
        ]
        assert all(begun)
        if disk_bytes == inf:
            assert begun == [list(texts_of(one)) for one in first if one._texts]
        for one in first:
            if engine == "kernels":
                assert all(kind.startswith(STATE) for kind in kinds_of(one))
            elif begun_rows := saved_rows(one):
                for file in one.store.folder.glob(BLOCKS):
                    file.write_bytes(bytes(file.stat().st_size))
                assert not any(row.any() for row in begun_rows)  # they are the file's own bytes
            assert not any(text.memory_bytes for text in texts_of(one).values())


def saved_rows(model: RecordedModel) -> list[torch.Tensor]:
    """The rows of the texts that the store has a part of."""
    return [
        row
        for name, text in texts_of(model).items()
        if model.store.block_count(name)
        for node in text.nodes
        for row in node.rows.values()
    ]


@pytest.mark.parametrize("disk_bytes", [inf, 0], ids=["unlimited", "full from the beginning"])
def test_texts_whose_rows_were_dropped_are_told(disk_bytes: float, tmp_path: Path) -> None:
    first = recorded("llama", tmp_path, "native", disk_bytes=disk_bytes)
    source = Source((5, 6, 7))
    for one in first:
        one.start(source, 8).extend([7])
        one.save()
        assert one.has_dropped(source) == (disk_bytes == 0)
        assert not one.has_dropped(Source((5, 6)))


@pytest.mark.parametrize("disk_bytes", [inf, 0], ids=["unlimited", "full from the beginning"])
def test_forwards_of_a_prompt_count_once_and_with_those_behind_a_prefix(
    disk_bytes: float, tmp_path: Path
) -> None:
    """Fault: those of BiTA, which draft behind a prompt of their own, counted nowhere, and those of a
    prompt that two examples have twice.
    """
    one, *_ = recorded("llama", tmp_path, "native", disk_bytes=disk_bytes)
    config, source, other = one.config, Source((5, 6, 7)), Source((5, 6))
    head_dim = config.hidden_size // config.num_attention_heads
    keys = torch.zeros(config.num_hidden_layers, config.num_key_value_heads, 1, head_dim)
    behind = SessionOptions(prefix=Prefix(keys, keys, torch.zeros(1, config.hidden_size)))
    one.start(source, 8).extend([7])
    one.save()
    assert one.forwards([source, source]) == {"whole": 1} and not one.has_dropped(other)
    one.start(source, 8, behind).extend([7])
    one.start(other, 8, behind).extend([6])
    one.save()
    assert one.forwards([source, other]) == {"whole": 3}
    assert one.has_dropped(other) == (disk_bytes == 0)


@pytest.mark.parametrize("engine", ["native", pytest.param("kernels", marks=needs_kernels)])
@pytest.mark.parametrize("disk_bytes", [inf, 1])
def test_texts_that_were_saved_part_by_part_need_no_forward(
    engine: str, disk_bytes: float, tmp_path: Path
) -> None:
    first = recorded("llama", tmp_path, engine, 1, disk_bytes)
    compare("bild", "llama", engine, 2, tmp_path, first)
    for one in first:
        one.save()
    again = recorded("llama", tmp_path, engine)
    compare("bild", "llama", engine, 2, tmp_path, again)
    ran = [
        text.forwards.total()
        for one in again
        for name, text in texts_of(one).items()
        if disk_bytes == inf or one.store.block_count(name)
    ]
    assert ran and not any(ran)


@pytest.mark.fast("native")
@pytest.mark.parametrize("engine", ["native", pytest.param("kernels", marks=needs_kernels)])
def test_rows_that_neither_memory_nor_disk_hold_run_again(engine: str, tmp_path: Path) -> None:
    for policy in ("bild", "speculative_tree", "bild_early_exit"):
        first = recorded("llama", tmp_path / policy, engine, memory_bytes=1, disk_bytes=0)
        compare(policy, "llama", engine, 2, tmp_path, first)
        for one in first:
            kinds = kinds_of(one)
            assert (
                all(kind.startswith(STATE) for kind in kinds) if engine == "kernels" else not kinds
            )
        assert first[0]._dropped_forwards and not (tmp_path / policy / "0").exists()


def test_rows_leave_memory_when_they_are_saved(tmp_path: Path) -> None:
    """At once: nodes refer to each other, and no garbage collector runs."""
    gc.disable()
    try:
        first = recorded("llama", tmp_path)
        compare("bild", "llama", "native", 1, tmp_path, first)
        rows = [
            weakref.ref(row)
            for one in first
            for text in texts_of(one).values()
            for node in text.nodes
            for row in node.rows.values()
        ]
        for one in first:
            one.save()
        assert rows and not any(row() is not None for row in rows)
    finally:
        gc.enable()


def test_loops_that_ask_for_one_text_at_once_record_it_each_for_itself(tmp_path: Path) -> None:
    """Prompts that a drafter's vocabulary does not tell apart; the first loop to end saves."""
    (live, *_) = models("llama", "native")
    source, folder = Source((2, 7, 9)), tmp_path / "record"

    def last_row(model: Any, second: int) -> torch.Tensor:
        session = model.start(source, 20)
        for token in (9, second, 8):
            scores = session.extend([token])
        if model is not live:
            model.save()
        return scores.logits

    expected = [last_row(live, second) for second in (5, 6)]
    model = RecordedModel(live, RecordStore(folder, {}))
    loops = [lambda second=second: last_row(model, second) for second in (5, 6)]
    rows_of_loops = [loop.result for loop in Batch(2).run(loops)]
    again = RecordedModel(live, RecordStore(folder, {}))
    for rows in (rows_of_loops, [last_row(again, second) for second in (5, 6)]):
        torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("policy", RECORDED)
def test_every_policy_decodes_over_saved_states_as_over_whole_rows(
    policy: str, tmp_path: Path
) -> None:
    for family in FAMILIES:
        if (policy, family) not in REFUSED:
            kinds = decode_twice(policy, family, "kernels", tmp_path / family)
            assert {kind for kind in kinds if not kind.startswith(STATE)} <= {HEAD_INPUT}


@needs_kernels
def test_a_row_that_its_state_does_not_give_again_is_saved_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: every second state has another last bit."""
    own = RecordedText._states_of

    def wrong(text: RecordedText, scores: Scores, count: int) -> torch.Tensor:
        states = own(text, scores, count)
        states[::2] = states[::2] * (1 + 2**-23)
        return states

    monkeypatch.setattr(RecordedText, "_states_of", wrong)
    kinds = decode_twice("bild", "llama", "kernels", tmp_path)
    assert LOGITS in kinds


@pytest.mark.parametrize("policy", [one for one in STATES if (one, "llama") not in REFUSED])
def test_methods_that_read_states_are_refused(policy: str, tmp_path: Path) -> None:
    live = models("llama", "native")
    method = built(
        method_of(policy, random.Random(0), live, tmp_path), tuple(map(RecordedModel, live))
    )
    with pytest.raises(UserError, match="reads states inside"):
        method.decode(Request(Source((2, 5, 9)), Limits(3, 4)), Trace())


def test_rows_of_siblings_are_their_own(tmp_path: Path) -> None:
    """Two branches with the same tokens below different ones, fed as a tree, then kept and rolled
    back.
    """
    (live, *_) = models("t5", "native")
    source = Source((0,), torch.tensor([[7, 9, 1]]))
    both = live.start(source, 20), RecordedModel(live).start(source, 20)
    tree = Tree(torch.tensor([-1, 0, 0, 1, 2, 3]))
    for session in both:
        session.extend([0])
    steps = [
        lambda one: one.extend(Rows([5, 6, 7, 8, 8, 9], tree)),
        lambda one: (one.keep([0, 2, 4]), one.extend([11, 12]))[1],
        lambda one: (one.rollback(3), one.extend([8, 9]))[1],
        lambda one: (one.rollback(1), one.extend(Rows([5, 6, 7, 8, 8, 9], tree)))[1],
        lambda one: (one.keep([0, 1, 3, 5]), one.extend([11, 12]))[1],
    ]
    for step in steps:
        logits = [step(session).logits for session in both]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)
        assert both[0].length == both[1].length


@pytest.mark.parametrize("layers", [(0,), (0, 2)])
def test_rows_of_a_view_are_those_behind_the_text_as_far_as_it_has_come(
    layers: tuple[int, ...],
) -> None:
    """The same token, drafted behind a drafted token, and behind the same token of the text."""
    (live, *_) = models("llama", "native")
    source = Source((2, 7, 9))
    both = live.start(source, 20), RecordedModel(live).start(source, 20)
    views = [LayerView(session, layers, NOTHING) for session in both]
    for session, view in zip(both, views, strict=True):
        session.extend([9])
        view.extend([5], LAST_LOGITS)
    for steps in (
        lambda session, view: view.extend([6], LAST_LOGITS),
        lambda session, view: (
            view.rollback(3),
            session.extend([5]),
            view.rollback(4),
            view.extend([6], LAST_LOGITS),
        )[-1],
        lambda session, view: (session.extend([6, 8]), view.rollback(0), view.extend([5, 6]))[-1],
    ):
        logits = [steps(session, view).logits for session, view in zip(both, views, strict=True)]
        torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


@pytest.mark.fast("native")
@pytest.mark.parametrize(
    "engine", ["native", pytest.param("kernels", marks=[needs_kernels, pytest.mark.slow])]
)
def test_examples_recorded_at_once_are_those_recorded_one_by_one(
    engine: str, tmp_path: Path
) -> None:
    """Each saves its own rows when it ends, while others go on."""
    target, draft, _ = models("t5", engine)
    chance = random.Random(4)
    sources = [random_source("t5", chance) for _ in range(7)]
    requests = [Request(one, Limits(1, chance.randint(2, 12), frozenset([1]))) for one in sources]
    rows, texts = [], []
    for size in (1, 3):
        folder = tmp_path / str(size)
        two = [
            RecordedModel(one, RecordStore(folder / name, {}))
            for one, name in ((target, "large"), (draft, "small"))
        ]
        node = shipped("bild")
        method = build_method(
            node, {"target": lambda two=two: two[0], "draft": lambda two=two: two[1]}
        )

        def loop(request: Request, method: Method = method, two: list = two) -> list[int]:
            own = [method.decode(request, Trace())[1:] for _ in range(2)]  # again, from the record
            assert own[0] == own[1]
            for one in two:
                one.save()
            return own[0]

        loops = [lambda request=request, loop=loop: loop(request) for request in requests]
        texts.append([one.result for one in Batch(size).run(loops)])
        rows.append([one.forwards(sources) for one in two])
    live = build_method(node, {"target": lambda: target, "draft": lambda: draft})
    assert texts[0] == texts[1] == [emitted(live, request, Trace()) for request in requests]
    assert rows[0] == rows[1] and rows[0][0]["whole"] > len(requests)
