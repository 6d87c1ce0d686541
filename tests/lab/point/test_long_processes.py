"""A decoder in a process that goes on, such as a notebook's or a service's: it leaves everything as it
was, sees what has changed, and goes on after whatever stopped it.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from threading import Barrier, Event, Thread

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import bild_lab
from bild_lab.engine.methods.lookup import suffix
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.loaded_checkpoint import evaluation_mode
from bild_lab.engine.models.hf.layer_control import Plan, following
from bild_lab.engine.models.hf.module_layers import head_input
from bild_lab.engine.models.native import why_no_kernels
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.point.decoder import LOADING
from bild_lab.lab.point.read_model import load_model
from bild_lab.lab.point.shared_models import SharedModels
from tests.policies import FAMILIES, GREEDY_ONLY, RUNNABLE, load
from tests.tiny import save, tiny_llama, tiny_t5, tiny_tokenizer

PROMPT, OTHER = "w5 w9 w30 w12", "w7 w3 w20"
INTERRUPTED_AT = (1, 2, 5)  # rounds
CPU = torch.device("cpu")
needs_kernels = pytest.mark.skipif(
    why_no_kernels(CPU, torch.float32) is not None, reason="no CPU kernels here"
)


@pytest.fixture
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def in_training(seed: int, dropout: float = 0.5) -> PreTrainedModel:
    """A T5 with dropout, in the middle of a training."""
    module = tiny_t5(seed)
    for part in module.modules():
        if isinstance(part, torch.nn.Dropout):
            part.p = dropout
    return module.train()


def with_tokenizer(module: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    return module, tiny_tokenizer(module.config.is_encoder_decoder)


# 1. What the process is set to


EVERY_KIND = ["speculative", "speculative_tree", "bild", "calm", "medusa", "eagle", "bita", "ngram"]


def texts_of(checkpoints: Path, policy: str) -> list[list[int]]:
    decoder = load(checkpoints, "llama", policy)
    texts = [decoder.generate(PROMPT, 20).token_ids]
    texts += [decoder.generate(PROMPT, 20, temperature=1.0, seed=seed).token_ids for seed in (1, 2)]
    return [*texts, *(one.token_ids for one in decoder.generate([PROMPT, OTHER], 12, batch=None))]


@pytest.mark.parametrize("default_dtype", [torch.float64, torch.bfloat16], indirect=True)
@pytest.mark.parametrize("policy", EVERY_KIND)
@pytest.mark.fast(
    "speculative-default_dtype0",
    "medusa-default_dtype1",
    "eagle-default_dtype1",
    "ngram-default_dtype0",
)
@pytest.mark.usefixtures("default_dtype")
def test_texts_do_not_depend_on_the_default_type_of_pytorch(checkpoints: Path, policy: str) -> None:
    found = []
    for dtype in (torch.get_default_dtype(), torch.float32):
        torch.set_default_dtype(dtype)
        load_model.cache_clear()
        found.append(texts_of(checkpoints, policy))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("family", "policy"),
    [("llama", "speculative"), ("llama", "alpha"), ("llama", "medusa"), ("t5", "speculative")],
)
@pytest.mark.parametrize("engine", ["auto", "hf"])
def test_texts_do_not_depend_on_the_default_device_of_pytorch(
    checkpoints: Path, family: str, policy: str, engine: str
) -> None:
    load(checkpoints, family, policy)  # makes the files that it needs
    found = []
    for default in ("meta", None):  # planted: a tensor that is made where none is wanted
        load_model.cache_clear()
        torch.set_default_device(default)
        try:
            decoder = load(checkpoints, family, policy, engine=engine, device="cpu")
            texts = [decoder.generate(PROMPT, 12, temperature=1.0, seed=3).token_ids]
            texts.append([*decoder.stream(PROMPT, 12)])
            found.append(texts)
            assert torch.get_default_device().type == (default or "cpu")
        finally:
            torch.set_default_device(None)
    assert found[0] == found[1]


def state_of_process() -> dict[str, object]:
    """What a library must not change."""
    return {
        "torch": torch.get_rng_state().tolist(),
        "numpy": repr(np.random.get_state()),
        "random": random.getstate(),
        "defaults": (torch.get_default_dtype(), torch.get_num_threads()),
        "modes": (torch.is_inference_mode_enabled(), torch.is_grad_enabled()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warnings": list(warnings.filters),
        "variables": dict(os.environ),
        "folder": os.getcwd(),
        "collects": gc.isenabled(),
    }


@pytest.mark.fast(
    "hf_generate-llama", "ppd-llama", "speculative-t5", "rejection_sampling-t5", "eagle-llama"
)
@pytest.mark.parametrize(("policy", "family"), RUNNABLE)
def test_every_policy_leaves_the_process_as_it_was(
    checkpoints: Path, policy: str, family: str
) -> None:
    load(checkpoints, family, policy)  # makes the files that it needs
    before = state_of_process()
    decoder = load(checkpoints, family, policy)
    decoder.generate(PROMPT, 8)
    list(decoder.stream(PROMPT, 8))
    decoder.generate([PROMPT, OTHER], 8, batch=None)
    if policy not in GREEDY_ONLY:
        decoder.generate(PROMPT, 8, temperature=1.0)
    abandoned = decoder.stream(PROMPT, 8)
    next(abandoned, None)
    assert state_of_process() == before  # also while a stream waits


# 2. What comes from files


def overwrite(module: PreTrainedModel, folder: Path) -> None:
    """Write other weights into the same file, as a training may."""
    file = folder / "model.safetensors"
    before = file.read_bytes()
    save(module, folder.with_name(f"{folder.name}-new"))
    content = (folder.with_name(f"{folder.name}-new") / file.name).read_bytes()
    assert len(content) == len(before) and content != before
    with file.open("r+b") as stream:
        stream.write(content)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


@pytest.mark.parametrize("engine", ["auto", "native", "hf"])
def test_a_checkpoint_that_was_saved_anew_is_read_anew(tmp_path: Path, engine: str) -> None:
    folder = save(tiny_llama(1), tmp_path / "model")
    first = bild_lab.load(folder, policy="vanilla", engine=engine)
    text = first.generate(PROMPT, 12).token_ids
    overwrite(tiny_llama(7), folder)
    again = bild_lab.load(folder, policy="vanilla", engine=engine)
    fresh = bild_lab.load(folder.with_name("model-new"), policy="vanilla", engine=engine)
    assert again.generate(PROMPT, 12).token_ids == fresh.generate(PROMPT, 12).token_ids != text
    assert again.target is not first.target
    for use in (first.generate, first.stream):
        with pytest.raises(
            UserError, match=r"model\.safetensors was overwritten .* load the model"
        ):
            list(use(PROMPT, 12))


@pytest.mark.parametrize("engine", ["auto", "native", "hf"])
def test_a_checkpoint_that_was_overwritten_before_its_weights_were_read_is_refused(
    tmp_path: Path, engine: str
) -> None:
    folder = save(tiny_llama(1), tmp_path / "model")
    decoder = bild_lab.load(folder, policy="vanilla", engine=engine)
    overwrite(tiny_llama(7), folder)
    with pytest.raises(UserError, match=r"model\.safetensors was overwritten .* load the model"):
        decoder.generate(PROMPT, 12)


def test_a_file_that_was_replaced_stays_for_those_who_have_it(tmp_path: Path) -> None:
    folder = save(tiny_llama(1), tmp_path / "model")
    first = bild_lab.load(folder, policy="vanilla", engine="native")
    text = first.generate(PROMPT, 12).token_ids
    other = save(tiny_llama(7), tmp_path / "other")
    os.replace(other / "model.safetensors", folder / "model.safetensors")
    assert first.generate(PROMPT, 12).token_ids == text
    again = bild_lab.load(folder, policy="vanilla", engine="native")
    assert again.generate(PROMPT, 12).token_ids != text


def test_a_file_of_weights_that_is_gone_and_other_files_that_are_written_anew_change_no_text(
    tmp_path: Path,
) -> None:
    folder = save(tiny_llama(1), tmp_path / "model")
    first = bild_lab.load(folder, policy="vanilla", engine="native")
    text = first.generate(PROMPT, 12).token_ids
    config = folder / "config.json"
    config.write_text(f"{config.read_text()}\n")
    assert first.generate(PROMPT, 12).token_ids == text
    (folder / "model.safetensors").unlink()
    assert first.generate(PROMPT, 12).token_ids == text


def test_a_checkpoint_of_one_file_is_known_by_it(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"weights")
    (stamp,) = Checkpoint(str(file)).file_stamps()
    assert not stamp.overwritten()
    file.write_bytes(b"other weights")
    assert stamp.overwritten()


def test_what_a_training_writes_beside_a_checkpoint_leaves_it_shared(tmp_path: Path) -> None:
    folder = save(tiny_llama(1), tmp_path / "model")
    first = bild_lab.load(folder, policy="vanilla")
    (folder / "metrics.json").write_text("{}")
    assert bild_lab.load(folder, policy="vanilla").target is first.target


def test_weights_leave_the_memory_with_the_decoders_that_have_them(checkpoints: Path) -> None:
    load_model.cache_clear()
    gone = [
        weakref.ref(load(checkpoints, "llama", policy).target) for policy in ("vanilla", "bild")
    ]
    assert gone[0]() is gone[1]() is not None  # the last pair stays for the next decoder
    held = load(checkpoints, "t5", "vanilla")
    gc.collect()
    assert gone[0]() is None
    load(checkpoints, "qwen3", "vanilla").generate(PROMPT, 2)
    assert load(checkpoints, "t5", "vanilla").target is held.target


def test_two_threads_read_the_weights_once(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_model.cache_clear()
    decoder, start = load(checkpoints, "llama", "vanilla"), Barrier(4)
    family, made = type(decoder.target).family.fget, []

    def counted(model: object) -> object:
        made.append(model)
        return family(model)

    monkeypatch.setattr(type(decoder.target), "family", property(counted))

    def one(_: int) -> list[int]:
        start.wait(timeout=20)
        return decoder.generate(PROMPT, 8).token_ids

    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(one, range(4)))
    assert len(made) == 1 and texts == texts[:1] * 4
    load_model.cache_clear()


def test_a_text_does_not_wait_while_another_decoders_weights_are_read(checkpoints: Path) -> None:
    decoder = load(checkpoints, "llama", "vanilla")
    text, pool = decoder.generate(PROMPT, 4), ThreadPoolExecutor(1)
    with LOADING:
        again = pool.submit(decoder.generate, PROMPT, 4).result(timeout=60)
    assert again.token_ids == text.token_ids


def test_models_are_let_go_between_two_looks_at_them() -> None:
    """Fault: a run that ends in one thread changes the list that another one goes through."""
    released = Thread(target=lambda: models.release())

    def read(path: str) -> Thread:  # any object
        released.start()
        released.join(timeout=0.2)
        assert released.is_alive()  # until the model is given
        return released

    models = SharedModels(read)
    assert models("nowhere/model") is released
    released.join(timeout=20)
    assert not released.is_alive()


def test_a_model_that_is_asked_for_often_takes_no_others_place() -> None:
    models = SharedModels(lambda path: Thread())  # any object
    first = weakref.ref(models("nowhere/first"))
    for _ in range(5):
        models("nowhere/second")
    assert first() is not None
    with suppress(KeyError), models.renewed():
        raise KeyError  # what failed lets nothing go
    assert first() is not None
    with models.renewed():
        second = weakref.ref(models("nowhere/second"))
    assert first() is None and second() is not None
    models.cache_clear()
    assert second() is None


@pytest.mark.parametrize(("family", "positions"), [("llama", 7), ("llama", 600), ("t5", 600)])
def test_no_thread_reads_tables_that_another_one_computes(
    checkpoints: Path, family: str, positions: int
) -> None:
    """Fault: of two first texts one found no rotations, or those of the other, shorter one."""
    load_model.cache_clear()
    decoder = load(checkpoints, family, "vanilla", engine="native").target.decoder
    place, begun, go_on = "_rotary" if family == "llama" else "distance_bias", Event(), Event()
    real = getattr(decoder, place)

    class Slow:
        """Computes the first table when it is told to."""

        def wait(self) -> None:
            if not begun.is_set():
                begun.set()
                assert go_on.wait(timeout=20)

        def __call__(self, *arguments: object) -> object:
            self.wait()
            return real(*arguments)

        def __getitem__(self, index: object) -> object:
            self.wait()
            return real[index]

    def size() -> int:
        return min(table.shape[0] for table in decoder.tables or [decoder._backward[0]])

    def reach(positions: int) -> int:
        decoder.reach(positions)
        return size()

    setattr(decoder, place, Slow())
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(reach, 7)
        assert begun.wait(timeout=20)
        second = pool.submit(reach, positions)
        time.sleep(0.05)  # if it does not wait for the first, it has read the tables now
        go_on.set()
        assert first.result() >= 7 and second.result() >= positions
    assert size() >= positions
    load_model.cache_clear()


# 3. A model in memory, which its user goes on with


def test_a_model_in_training_is_evaluated_and_stays_in_training() -> None:
    module = in_training(3)
    module.encoder.eval()
    modes = [part.training for part in module.modules()]
    evaluated = copy.deepcopy(module).eval()
    decoder = bild_lab.load(with_tokenizer(module), policy="vanilla")
    expected = bild_lab.load(with_tokenizer(evaluated), policy="vanilla").generate(PROMPT, 12)
    for _ in range(2):
        assert decoder.generate(PROMPT, 12).token_ids == expected.token_ids
        assert [part.training for part in module.modules()] == modes
    together = decoder.generate([PROMPT] * 2, 12)
    assert [one.token_ids for one in together] == [expected.token_ids] * 2
    pieces = decoder.stream(PROMPT, 12)
    text = next(pieces)
    assert [part.training for part in module.modules()] == modes  # between two pieces
    assert text + "".join(pieces) == expected.text


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("make", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_of_a_model_that_decoded_runs_its_own_weights(family: str, make: object) -> None:
    make_model = tiny_t5 if family == "t5" else tiny_llama
    module, fresh = make_model(1).eval(), make_model(2).eval()
    policy = "calm" if family == "t5" else "layer_skip"
    text = bild_lab.load(with_tokenizer(module), policy=policy).generate(PROMPT, 12).token_ids
    copied = make(module)
    with torch.no_grad():
        for layer in copied.get_decoder().parameters():
            layer.mul_(1.7)
    ids = torch.tensor([[5, 9, 12]])
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids} if family == "t5" else {})}
    fresh.load_state_dict(copied.state_dict())
    torch.testing.assert_close(copied(**inputs).logits, fresh(**inputs).logits)
    assert not torch.equal(copied(**inputs).logits, module(**inputs).logits)
    again = bild_lab.load(with_tokenizer(module), policy=policy).generate(PROMPT, 12).token_ids
    assert again == text


@pytest.mark.parametrize("policy", ["hf_generate", "hf_assisted"])
def test_generate_of_transformers_leaves_a_models_own_settings(policy: str) -> None:
    target, draft = tiny_llama(1), tiny_llama(2)
    own = target.generation_config, draft.generation_config
    said = [settings.to_dict() for settings in own]
    decoder = bild_lab.load(with_tokenizer(target), with_tokenizer(draft), policy)
    decoder.generate(PROMPT, 5)
    if policy == "hf_generate":
        decoder.generate([PROMPT, OTHER], 5, batch=2)
    assert (target.generation_config, draft.generation_config) == own
    assert [settings.to_dict() for settings in own] == said


def test_a_thread_that_has_ended_leaves_the_others_in_evaluation_mode() -> None:
    module = in_training(3)
    module.encoder.eval()
    modes = [part.training for part in module.modules()]
    first, second = evaluation_mode([module]), evaluation_mode([module, module])
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert not any(part.training for part in module.modules())
    second.__exit__(None, None, None)
    assert [part.training for part in module.modules()] == modes


def test_a_text_that_fails_leaves_a_model_in_training() -> None:
    module = in_training(3)
    with pytest.raises(KeyError, match="a fault"), evaluation_mode([module]):
        raise KeyError("a fault")
    assert all(part.training for part in module.modules())


def test_generate_of_transformers_runs_what_a_user_has_compiled() -> None:
    module, calls = tiny_llama(1).eval(), []

    def compiled(*arguments: object, **options: object) -> object:
        calls.append(1)
        return module._call_impl(*arguments, **options)

    module._compiled_call_impl = compiled  # as module.compile() sets it
    bild_lab.load(with_tokenizer(module), policy="hf_generate", engine="hf").generate(PROMPT, 3)
    assert len(calls) == 3


def test_of_two_threads_each_reads_the_heads_inputs_of_its_own_forward() -> None:
    module, plan, other = tiny_llama(1).eval(), Plan(start=0), Plan(start=0)
    ids = torch.tensor([[5, 9, 12]])
    with torch.inference_mode(), head_input(module, plan) as read:
        with following(other):
            module(input_ids=ids)
        assert read == []
        with following(plan):
            module(input_ids=ids)
    assert [tuple(one.shape[:2]) for one in read] == [(1, 3)]


# 4. What stops a text


@pytest.mark.fast("suffix-llama", "speculative-t5", "ppd-llama")
@pytest.mark.parametrize(("policy", "family"), RUNNABLE)
def test_after_an_interrupt_a_decoder_is_as_new(
    checkpoints: Path, policy: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(checkpoints, family, policy).generate(PROMPT, 20)
    decoder = load(checkpoints, family, policy)
    step, rounds = Trace.step, [0]

    def interrupted(trace: Trace, *arguments: object, **options: object) -> None:
        rounds[0] -= 1
        if rounds[0] == 0:
            raise KeyboardInterrupt
        step(trace, *arguments, **options)

    monkeypatch.setattr(Trace, "step", interrupted)
    for count in INTERRUPTED_AT:
        for use in (decoder.generate, decoder.stream):
            rounds[0] = count
            try:
                list(use(OTHER, 20)) if use == decoder.stream else use(OTHER, 20)
            except KeyboardInterrupt:
                continue
    monkeypatch.setattr(Trace, "step", step)
    next(decoder.stream(OTHER, 20), None)  # abandoned
    found = decoder.generate(PROMPT, 20)
    assert found.token_ids == expected.token_ids and found.trace.rounds == expected.trace.rounds
    assert not torch.is_inference_mode_enabled()


def test_an_automaton_that_an_interrupt_left_half_changed_is_not_used_again(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = load(checkpoints, "llama", "suffix").generate(PROMPT, 20)
    make_state = suffix.SuffixAutomaton._state
    for count in range(1, 12):
        decoder, left = load(checkpoints, "llama", "suffix"), [count]

        def state(
            automaton: suffix.SuffixAutomaton, *values: object, left: list[int] = left
        ) -> int:
            left[0] -= 1
            if left[0] == 0:
                raise KeyboardInterrupt
            return make_state(automaton, *values)

        monkeypatch.setattr(suffix.SuffixAutomaton, "_state", state)
        with pytest.raises(KeyboardInterrupt):
            decoder.generate(OTHER, 20)
        monkeypatch.setattr(suffix.SuffixAutomaton, "_state", make_state)
        found = decoder.generate(PROMPT, 20)
        assert found.trace.rounds == expected.trace.rounds


@pytest.mark.fast("ppd-llama", "bild-t5", "lookahead-llama")
@pytest.mark.parametrize(("policy", "family"), RUNNABLE)
def test_two_streams_of_a_decoder_take_turns(checkpoints: Path, policy: str, family: str) -> None:
    decoder, threads = load(checkpoints, family, policy), torch.get_num_threads()
    expected = [decoder.generate(prompt, 20).text for prompt in (PROMPT, OTHER)]
    torch.set_num_threads(2)
    try:
        streams, texts = [decoder.stream(prompt, 20) for prompt in (PROMPT, OTHER)], ["", ""]
        waiting = [0, 1]
        while waiting:
            for which in list(waiting):
                piece = next(streams[which], None)
                assert torch.get_num_threads() == 2
                if piece is None:
                    waiting.remove(which)
                else:
                    texts[which] += piece
    finally:
        torch.set_num_threads(threads)
    assert texts == expected


FORKED = """
import multiprocessing, sys
import torch, bild_lab
torch.set_num_threads(2)
decoder = bild_lab.load(sys.argv[1], sys.argv[2], policy="speculative", engine="kernels")
text = decoder.generate("w5 w9 w30 w12", 20).token_ids
def child(queue):
    queue.put(decoder.generate("w5 w9 w30 w12", 20).token_ids)
context = multiprocessing.get_context("fork")
queue = context.Queue()
worker = context.Process(target=child, args=(queue,), daemon=True)
worker.start()
found = queue.get(timeout=30)
worker.join(timeout=60)
assert found == text, (found, text)
assert decoder.generate("w5 w9 w30 w12", 20).token_ids == text and torch.get_num_threads() == 2
"""


@needs_kernels
def test_a_forked_process_decodes_with_the_kernels(checkpoints: Path) -> None:
    pair = [str(checkpoints / name) for name in ("llama", "llama-draft")]
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    ended = subprocess.run(
        [sys.executable, "-c", FORKED, *pair], capture_output=True, text=True, env=environment
    )
    assert ended.returncode == 0, ended.stderr[-2000:]


# 5. What goes in and what comes out


def test_numbers_may_come_from_numpy_and_pytorch(checkpoints: Path) -> None:
    pair = {"target": checkpoints / "llama", "draft": checkpoints / "llama-draft"}
    for knobs in (
        {"fallback": 0.5, "window": 3},
        {"fallback": np.float64(0.5), "window": np.int64(3)},
    ):
        decoder = bild_lab.load(**pair, policy="bild", rollback=np.linspace(0, 2, 3)[2], **knobs)
        found = decoder.generate(PROMPT, np.int64(9), temperature=np.float32(0.5), seed=np.uint8(3))
        expected = decoder.generate(PROMPT, 9, temperature=0.5, seed=3)
        assert found.token_ids == expected.token_ids
        texts = decoder.generate([PROMPT, OTHER], 9, batch=np.int64(2))
        assert texts[0].token_ids == decoder.generate(PROMPT, 9).token_ids
        last = decoder.generate(PROMPT, torch.tensor(9), temperature=torch.tensor(0.5), seed=3)
        assert last.token_ids == expected.token_ids
        assert "".join(decoder.stream(PROMPT, np.int32(9))) == decoder.generate(PROMPT, 9).text


def test_prompts_may_come_from_pandas_and_numpy(checkpoints: Path) -> None:
    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla")
    expected = [decoder.generate(prompt, 6).token_ids for prompt in (PROMPT, OTHER)]
    frame = pd.DataFrame({"prompt": [PROMPT, OTHER]})
    for prompts in (frame["prompt"], frame["prompt"].to_numpy(), np.array([PROMPT, OTHER])):
        assert [one.token_ids for one in decoder.generate(prompts, 6)] == expected
    assert decoder.generate(np.str_(PROMPT), 6).token_ids == expected[0]


def test_what_is_no_prompt_among_prompts_is_refused(checkpoints: Path) -> None:
    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla")
    for prompts in ([PROMPT, 5], [[5, 9], 7]):
        with pytest.raises(UserError, match="a prompt is text, token ids .* among prompts"):
            decoder.generate(prompts, 6)
    with pytest.raises(UserError, match=r"the prompt \[\] has no tokens"):
        decoder.generate([], 6)


def test_types_and_devices_may_be_those_of_pytorch(checkpoints: Path) -> None:
    given = {"dtype": torch.bfloat16, "device": torch.device("cpu")}
    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla", **given)
    assert decoder.target.dtype == torch.bfloat16 and decoder.target.device == CPU


def test_what_looks_like_token_ids_and_is_none_is_refused(checkpoints: Path) -> None:
    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla")
    for prompts in ([["5", "9"]], [["w5"]], [[5.0]]):
        with pytest.raises(UserError, match=r"token ids must be whole numbers|a prompt is text"):
            decoder.generate(prompts, 6)
    with pytest.raises(UserError, match="of a tokenizer's output give the input_ids"):
        decoder.generate(tiny_tokenizer(False)(PROMPT), 6)
    with pytest.raises(UserError, match="max_source_tokens must be a whole number >= 1, got 0"):
        decoder.generate(PROMPT, 6, max_source_tokens=0)
    with pytest.raises(UserError, match="policy must be a name, or a composed policy, got None"):
        bild_lab.load(checkpoints / "llama", policy=None)
    with pytest.raises(TypeError, match=r"call bild_lab\.load there"):
        pickle.dumps(decoder)


def test_a_result_is_stored_without_the_models(checkpoints: Path) -> None:
    result = load(checkpoints, "llama", "speculative").generate(PROMPT, 20)
    stored = pickle.dumps(result)
    assert len(stored) < 200_000
    assert pickle.loads(stored).trace.stages_s == result.trace.stages_s
    assert copy.deepcopy(result).trace.rounds == result.trace.rounds
    line = {key: value for key, value in asdict(result).items() if key != "trace"}
    assert json.loads(json.dumps(line))["token_ids"] == result.token_ids
    assert repr(result).startswith("Generation(text=") and "Round(" not in repr(result)


def test_the_package_shows_what_is_public() -> None:
    shown = [name for name in dir(bild_lab) if not name.startswith("__")]
    assert shown == ["Decoder", "Generation", "load", "load_results", "run"]
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        _ = bild_lab.lod
