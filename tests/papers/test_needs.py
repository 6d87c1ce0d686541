"""Memory, downloads and hours of the papers' commands, beside numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from transformers import GPT2Config, LlamaConfig, T5Config

from bild_lab.papers.runs.needs import (
    Needs,
    downloads,
    gpu_hours_of,
    needs,
    size_of,
)
from bild_lab.papers.runs.paper_runs import RunSetting
from bild_lab.papers.runs.training_needs import (
    BITA,
    FINE_TUNING,
    LAYER_HEADS,
    MEDUSA,
    ModelShape,
    Training,
    shape_of,
    training_flops,
    training_memory,
)
from tests.papers.test_paper_runs import setting

LLAMA = "meta-llama/Llama-2-7b-chat-hf"
TUNING = Training(FINE_TUNING, 1000, 1, 64, 1, "adamw", 128, None)
XSUM_TOKENS = 28  # of a mean answer, by its card


def alone(**changes: Any) -> Needs:
    """Of a target with 20 GB of weights and a drafter with 10."""
    plain = Needs(
        setting(), {}, weights_gb=30, state_gb=2, row_gb=1, rows=10, room_gb=40, examples=None,
        hours=None, drafts_gb=10,
    )  # fmt: skip
    return replace(plain, **changes)


def test_the_target_is_spread_with_its_rows_and_the_drafter_is_whole_on_one_gpu() -> None:
    need = alone()
    # 20 + 10 + 2 + 1 GB are fixed on one GPU, 10 + 10 + 2 + 1 on each of two; rows take 36 GB's rest
    assert (need.rows_on(1), need.memory_on(1)) == (3, 36)
    assert (need.rows_on(2), need.memory_on(2)) == (10, 28)
    assert need.memory_gb == 36 and need.fitting == [*range(1, 9)]
    small = alone(room_gb=30)
    assert (small.rows_on(1), small.memory_on(1)) == (1, 34)  # at least one, whether it fits or not
    assert small.rows_on(2) == 8 and small.fitting == [*range(2, 9)]
    assert alone(row_gb=None).memory_on(1) == 33 and alone(row_gb=None).rows_on(1) == 10


def test_rows_of_a_training_divide_its_step() -> None:
    trained = setting(training=TUNING)
    assert [alone(setting=trained, rows=rows).rows_on(1) for rows in (10, 9, 2)] == [2, 3, 2]


def test_a_spread_model_takes_as_many_gpus_as_cost_the_fewest_gpu_hours() -> None:
    hours = {1: 20.0, 2: 5.0, 3: 3.0, 4: 2.6, 5: 2.5, 6: 2.5, 7: 2.5, 8: 2.5}
    spread = alone(setting=setting(spread=True), room_gb=30)
    timed = spread.timed(hours.__getitem__)
    assert (timed.gpus, timed.hours, timed.gpu_hours) == (3, 3, 9)
    for node, gpus in ((2, 2), (1, 2)):  # one GPU does not hold it
        assert replace(spread, node_gpus=node).timed(hours.__getitem__).gpus == gpus
    assert alone(room_gb=30).timed(hours.__getitem__).gpus == 1


def test_hours_of_a_command_are_known_if_those_of_each_setting_are() -> None:
    three, four = alone(hours=3.0, gpus=2), alone(hours=4.0)
    assert gpu_hours_of([three, four]) == 10
    assert gpu_hours_of([three, alone()]) is gpu_hours_of([alone()]) is gpu_hours_of([]) is None


def test_each_id_is_downloaded_once() -> None:
    pairs = [needs(setting(), "t4"), needs(setting(drafts=("google-t5/t5-small",)), "t4")]
    found = downloads([*pairs, *pairs])
    assert found["EdinburghNLP/xsum"] == 0.26
    assert set(found) == {
        "kssteven/T5-large-xsum", "kssteven/T5-small-xsum", "google-t5/t5-small",
        "EdinburghNLP/xsum",
    }  # fmt: skip
    half = needs(setting(target=LLAMA, drafts=()), "a100").download_gb[LLAMA]
    assert half == pytest.approx(2 * 6.74, rel=0.01)  # of 16 bits in the file


def test_weights_are_those_of_the_target_the_drafters_and_the_heads() -> None:
    target, draft = size_of("kssteven/T5-large-xsum"), size_of("kssteven/T5-small-xsum")
    found = needs(setting(), "t4")
    assert found.weights_gb == pytest.approx(4e-9 * (target.weights + draft.weights))
    assert found.drafts_gb == pytest.approx(4e-9 * draft.weights)
    itself = setting(drafts=("kssteven/T5-large-xsum",))  # which drafts for itself
    assert needs(itself, "t4").drafts_gb == 0
    headed, plain = (needs(setting(target=LLAMA, heads=heads), "a100") for heads in (2, 0))
    assert headed.weights_gb - plain.weights_gb == pytest.approx(4e-9 * 2 * 32000 * 4096)


def step_s(model: str, launch_bound: bool) -> float:
    """Of a forward on an A100, in float32: weights at 0.6 of 2,039 GB/s, or 0.1 ms a layer."""
    size = size_of(model)
    return size.layers * 1e-4 if launch_bound else size.read * 4e-9 / (0.6 * 2039)


@pytest.mark.parametrize(("model", "launch_bound"), [(LLAMA, False), ("google-t5/t5-small", True)])
def test_a_point_decodes_every_text_with_its_method_and_its_baseline(
    model: str, launch_bound: bool
) -> None:
    one = setting(target=model, drafts=(), points=1)
    tokens = 203 * XSUM_TOKENS * (1 + 1 / 1.5)  # 200 texts and three for warm-up
    expected = tokens * step_s(model, launch_bound) / 3600
    assert needs(one, "a100").hours == pytest.approx(expected)
    assert needs(replace(one, repeats=3), "a100").hours == pytest.approx(expected * 603 / 203)
    short = replace(one, max_new_tokens=7)
    assert needs(short, "a100").hours == pytest.approx(expected * 7 / XSUM_TOKENS)


def test_answers_are_decoded_many_at_once_beside_caches_that_are_half_full() -> None:
    asked = setting(target=LLAMA, drafts=(), points=0, at_once=16, dtype="bfloat16")
    need = needs(asked, "a100")
    assert need.rows_on(1) == 16
    assert need.row_gb == pytest.approx(2e-9 * 2 * 32 * 4096 * (512 + 128))
    read_s = (size_of(LLAMA).read * 2e-9 + 16 * need.row_gb / 2) / (0.6 * 2039)
    assert need.hours == pytest.approx(200 * XSUM_TOKENS / 16 * read_s / 3600)


def trained(model: str = "google-t5/t5-small", **changes: Any) -> RunSetting:
    """dataset: of the setting; others are of its training."""
    data = changes.pop("dataset", {})
    recipe = replace(TUNING, **changes)
    return setting(target=model, drafts=(), points=0, training=recipe, dataset=data)


def hours(**changes: Any) -> float:
    found = needs(trained(**changes), "a100").hours
    assert found is not None
    return found


def test_a_small_step_takes_what_its_launches_do() -> None:
    one = hours(batch_size=1)  # six layers of an encoder, and six of a decoder
    assert one == pytest.approx(1000 * 12 * 5e-3 / 3600)
    assert hours(batch_size=1, trainings=4) == pytest.approx(4 * one)
    assert hours(batch_size=8, accumulate=8) == pytest.approx(8 * one)
    by_passes = hours(batch_size=2, steps=None, passes=2.5, dataset={"limit": 801})
    assert by_passes == pytest.approx(1002 * 12 * 5e-3 / 3600)


def test_a_large_step_takes_what_its_products_do() -> None:
    size = size_of("kssteven/T5-large-xsum")
    wide = trained("kssteven/T5-large-xsum", batch_size=4096)
    flops = training_flops(wide.training, size.shape, size.weights, 512, XSUM_TOKENS)
    product_s = 4096 * flops / (0.28 * 312e12)
    assert needs(wide, "a100", room_gb=1e5).hours == pytest.approx(1000 * product_s / 3600)
    conversations = replace(wide, dataset={**wide.dataset, "turns": None})
    longer = training_flops(wide.training, size.shape, size.weights, 512, 128)
    found = needs(conversations, "a100", room_gb=1e5).hours
    assert found == pytest.approx(1000 * product_s / 3600 * longer / flops)


def test_rows_that_do_not_fit_are_more_passes() -> None:
    whole = needs(trained(), "a100")
    assert whole.rows == whole.rows_on(1) == 64
    fixed = whole.memory_on(1) - 64 * whole.row_gb
    tight = needs(trained(), "a100", room_gb=(fixed + 40 * whole.row_gb) / 0.9)
    assert tight.rows_on(1) == 32 and tight.hours == pytest.approx(2 * whole.hours)
    assert needs(trained(accumulate=4), "a100").rows == 16


def test_evaluations_decode_their_texts_in_batches() -> None:
    plain = hours(batch_size=64)

    def evaluations(every: int, texts: int) -> float:
        return hours(batch_size=64, evaluate_every=every, evaluated=texts) - plain

    # ten evaluations of four batches; a forward by modules takes 1.5 ms a layer
    expected = 10 * 4 * XSUM_TOKENS * 6 * 1.5e-3 / 3600
    assert evaluations(100, 200) == pytest.approx(expected)
    assert evaluations(50, 200) == pytest.approx(2 * expected)
    assert evaluations(100, 257) == pytest.approx(expected * 5 / 4)


def test_what_a_training_keeps_is_its_weights_their_gradients_and_its_optimizers_moments() -> None:
    weights = size_of("google-t5/t5-small").weights
    for optimizer, numbers in (("adamw", 3), ("adafactor", 1)):
        need = needs(trained(optimizer=optimizer), "a100")
        # each in float32, beside a copy of the weights in bfloat16
        assert need.state_gb == pytest.approx(1e-9 * weights * (4 * numbers + 2))
    assert needs(trained(kind="counts"), "a100").row_gb is None


DECODER = ModelShape(
    dim=8, queries=8, cached=16, heads=2, shared_heads=False, hidden=32, gated=False, layers=3,
    encoder=0, vocabulary=100,
)  # fmt: skip
SEQ2SEQ = replace(DECODER, gated=True, encoder=2)
WEIGHTS = 10_000


def learned(kind: str, **changes: Any) -> Training:
    return replace(TUNING, kind=kind, **changes)


def test_the_work_of_a_row_beside_a_frozen_model() -> None:
    masks = {"splits": 4, "mask_tokens": 3}
    bita = learned(BITA, module=masks)
    # back through the masks for the gradient of their values
    assert training_flops(bita, DECODER, WEIGHTS, 50, 30) == WEIGHTS * (2 * 80 + 4 * 12)
    capped = replace(bita, all_tokens=60)
    assert training_flops(capped, DECODER, WEIGHTS, 50, 30) == WEIGHTS * (2 * 60 + 4 * 12)
    heads = {"heads": 3, "layers": 2, "shared": False, "contexts": None}
    blocks, ends = 3 * 2 * 8 * 9, 3 * 100 * 8
    for changes, matrices, contexts in (
        ({}, blocks + ends, 30),
        ({"shared": True, "contexts": 7}, blocks, 7),
    ):
        medusa = learned(MEDUSA, module={**heads, **changes})
        expected = WEIGHTS * 2 * 80 + 6 * matrices * contexts
        assert training_flops(medusa, DECODER, WEIGHTS, 50, 30) == expected
    for rank, matrices in ((None, 2 * 100 * 8), (4, 2 * 4 * (100 + 8))):
        layer_heads = learned(LAYER_HEADS, module={"layers": [1, 2], "rank": rank})
        expected = WEIGHTS * 2 * 80 + 8 * matrices * 30
        assert training_flops(layer_heads, DECODER, WEIGHTS, 50, 30) == expected


def test_the_work_of_a_row_of_a_fine_tuning() -> None:
    assert training_flops(TUNING, DECODER, WEIGHTS, 50, 30) == 6 * (WEIGHTS - 800) * 80
    feed_forward = 3 * 8 * 32
    encoder, decoder = 2 * (4 * 64 + feed_forward), 3 * (6 * 64 + feed_forward)
    keys_and_values = 3 * 2 * 64  # of the encoder's rows, in each layer of the decoder
    for loss, heads in (("last", 1), ("early_exit", 2), ("calm", 3)):
        expected = 6 * ((encoder + keys_and_values) * 50 + (decoder + heads * 800) * 30)
        found = training_flops(replace(TUNING, loss=loss), SEQ2SEQ, WEIGHTS, 50, 30)
        assert found == expected
    assert training_flops(learned("counts"), DECODER, WEIGHTS, 50, 30) is None


def test_what_is_trained_beside_a_frozen_model_is_kept_with_its_state() -> None:
    sizes = {"splits": 4, "mask_tokens": 3, "prompt_tokens": 5}
    for prompt, weights in (
        ("none", 3 * 8),
        ("shallow", 3 * 8 + 5 * 8),
        ("deep", 3 * 8 + 5 * 3 * 16),
    ):
        found = training_memory(
            learned(BITA, module={**sizes, "prompt": prompt}), DECODER, WEIGHTS, 50
        )
        assert (found.trained, found.state) == (4 * weights, 12 * weights)
    heads = {"heads": 3, "layers": 2, "shared": True, "contexts": None}
    found = training_memory(learned(MEDUSA, module=heads), DECODER, WEIGHTS, 50)
    matrices = 3 * 2 * 8 * 9
    # beside moments and gradients a copy in bfloat16, and its gradients
    assert (found.trained, found.state) == (4 * matrices, (12 + 4) * matrices)
    for rank, trained_weights, frozen in ((None, 2 * 800, 0), (4, 2 * 4 * 108, 800)):
        module = {"layers": [1, 2], "rank": rank}
        found = training_memory(learned(LAYER_HEADS, module=module), DECODER, WEIGHTS, 50)
        assert found.trained == 4 * (trained_weights + frozen)


def test_rows_of_a_training_are_as_long_as_its_limit() -> None:
    module = {"splits": 4, "mask_tokens": 3, "prompt_tokens": 5, "prompt": "deep"}
    whole, capped, shorter = (
        training_memory(learned(BITA, module=module, all_tokens=limit), DECODER, WEIGHTS, prompt)
        for limit, prompt in ((None, 50), (100, 50), (None, -28))
    )
    assert capped.row == shorter.row < whole.row  # 100 tokens, an answer of 128 among them


def test_the_sizes_of_a_model_are_those_of_its_configuration() -> None:
    shared = shape_of(LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=2))
    assert (shared.cached, shared.shared_heads, shared.encoder) == (2 * 2 * 8, True, 0)
    whole = shape_of(LlamaConfig(hidden_size=64, num_attention_heads=8, num_key_value_heads=8))
    assert (whole.cached, whole.shared_heads, whole.queries) == (2 * 64, False, 64)
    assert shape_of(GPT2Config(n_embd=64, n_head=4, n_inner=99)).hidden == 99
    t5 = shape_of(T5Config(num_layers=5, num_decoder_layers=3, d_kv=16, num_heads=4, d_model=32))
    assert (t5.encoder, t5.layers, t5.queries, t5.cached) == (5, 3, 64, 128)


def test_a_text_that_is_cut_has_no_more_contexts_than_tokens() -> None:
    heads = {"heads": 3, "layers": 2, "shared": False, "contexts": None}
    for kind, module in ((MEDUSA, heads), (LAYER_HEADS, {"layers": [1, 2], "rank": None})):
        cut, short = (
            training_memory(
                learned(kind, module=module, target_tokens=answer, all_tokens=100), DECODER, 0, 200
            )
            for answer in (500, 100)
        )
        assert cut.row == short.row


def row_of(kind: str, shape: ModelShape, prompt: int, **changes: Any) -> int:
    found = training_memory(learned(kind, **changes), shape, 0, prompt)
    assert found is not None
    return found.row


def test_a_row_of_bita_holds_its_prompt_and_a_copy_of_what_heads_share() -> None:
    sizes = {"splits": 4, "mask_tokens": 3, "prompt_tokens": 5}
    small = replace(DECODER, vocabulary=3)  # so that the cache counts, and not the logits

    def row(prompt: str, shape: ModelShape = small, **more: int) -> int:
        module = {**sizes, "prompt": prompt, **more}
        return row_of(BITA, shape, 50, module=module, target_tokens=30)

    assert row("shallow") > row("none") == row("none", prompt_tokens=50)
    assert row("deep", prompt_tokens=50) > row("deep") > row("none")
    # twelve rows see 80 tokens and each other; keys and values once for each of two heads
    columns = 80 + 12
    layer = 12 * (64 + 32 + 8 + 192 + 2 * columns) + columns * 2 * 2 * 8
    copy = 3 * columns * 2 * 16
    shared = 3 * layer + 12 * 4 * 8 + copy + 12 * 3 * (2 + 4)
    assert row("none", replace(small, shared_heads=True)) == shared


def test_few_heads_take_less_than_the_model_that_they_read() -> None:
    module = {"heads": 1, "layers": 1, "shared": False, "contexts": 1}
    alone = 80 * 2 * (3 * 32 + 2 * 8)
    assert row_of(MEDUSA, DECODER, 50, module=module, target_tokens=30) == alone


def test_a_row_of_an_encoder_and_a_decoder_grows_with_both_its_texts() -> None:
    def row(source: int, answer: int, loss: str = "last") -> int:
        return row_of(FINE_TUNING, SEQ2SEQ, source, target_tokens=answer, loss=loss)

    # scores of two heads in two and three layers, and one bias of position for all of them
    squared = {"source": 2 * (2 * 2 + 4), "answer": 2 * (3 * 2 + 4)}
    assert row(30, 7) - 2 * row(20, 7) + row(10, 7) == 200 * squared["source"]
    assert row(7, 30) - 2 * row(7, 20) + row(7, 10) == 200 * squared["answer"]
    # a source's token in each layer of the encoder, and as keys and values of the decoder's
    attention, feed_forward, crossed = 64 + 48 + 80 + 8 + 8, 64 + 32 + 480 + 8, 32 + 32
    linear = 2 * (attention + feed_forward) + 3 * (crossed + 2 * 2 * 7)
    assert row(20, 7) - row(10, 7) == 10 * linear + 300 * squared["source"]
    # logits of inner layers in float32, of 100 tokens
    assert row(20, 7, "early_exit") - row(20, 7) == 7 * 400
    assert row(20, 7, "calm") - row(20, 7) == 2 * 7 * 400
