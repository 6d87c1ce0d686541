"""The toy pair trains once, loads like any checkpoint, and never leaves half a pair behind."""

import random

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

from bild_lab.data.toy import toy_corpus
from bild_lab.training import toy_trainer
from bild_lab.training.toy import Recipe, Shape, toy_pair

MICRO = Recipe(
    target=Shape(2, 16, 32, 2, steps=3, warm_up_steps=1),
    draft=Shape(1, 16, 32, 2, steps=2, warm_up_steps=1),
    vocabulary=300,
    batch=4,
    sentences=200,
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BILD_LAB_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def pair(cache):
    return toy_pair(progress=False, recipe=MICRO)


def test_both_models_load_through_the_auto_classes_in_any_dtype(pair):
    for folder, layers in zip(pair, (2, 1), strict=True):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            model = AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype)
            assert model.dtype == dtype
            assert len(model.decoder.block) == layers
            assert torch.isfinite(model.shared.weight).all()
        assert model.config.decoder_start_token_id == 0
        assert model.generation_config.eos_token_id == 1


def test_hugging_face_generate_runs_on_both(pair):
    for folder in pair:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForSeq2SeqLM.from_pretrained(folder)
        answer = model.generate(**tokenizer("Der Hund schläft.", return_tensors="pt"), max_new_tokens=4)
        assert answer[0, 0] == 0
        assert 2 <= answer.shape[1] <= 5


def test_the_tokenizer_gives_text_back_and_ends_it_with_eos(pair):
    target, draft = map(AutoTokenizer.from_pretrained, pair)
    assert target.get_vocab() == draft.get_vocab()
    for example in toy_corpus("test")[:50]:
        for text in example.values():
            ids = target(text)["input_ids"]
            assert ids[-1] == target.eos_token_id == 1
            assert target.decode(ids, skip_special_tokens=True) == text


def test_padding_is_token_zero(pair):
    tokenizer = AutoTokenizer.from_pretrained(pair[0])
    batch = tokenizer(["Ja.", "Der Hund schläft heute in der Stadt."], padding=True)
    assert batch["input_ids"][0][-1] == tokenizer.pad_token_id == 0
    assert batch["attention_mask"][0][-1] == 0


def test_a_second_call_does_not_train_again(pair, monkeypatch):
    monkeypatch.setattr(toy_trainer, "train_pair", _must_not_run)
    assert toy_pair(progress=False, recipe=MICRO) == pair


def test_another_recipe_gets_another_folder(pair, monkeypatch):
    monkeypatch.setattr(toy_trainer, "train_pair", _must_not_run)
    with pytest.raises(AssertionError, match="trained"):
        toy_pair(progress=False, recipe=Recipe(target=MICRO.target, draft=MICRO.draft, seed=1))


def test_an_interrupted_training_leaves_nothing_that_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))

    def interrupted(recipe, pairs, target, draft, progress):
        target.mkdir()
        (target / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(toy_trainer, "train_pair", interrupted)
        with pytest.raises(KeyboardInterrupt):
            toy_pair(progress=False, recipe=MICRO)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(toy_trainer, "train_pair", _must_not_run)
    with pytest.raises(AssertionError, match="trained"):
        toy_pair(progress=False, recipe=MICRO)


def test_of_two_processes_the_first_to_finish_wins(tmp_path, monkeypatch):
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))

    def write(name):
        def train(recipe, pairs, target, draft, progress):
            if name == "slow":  # the other process starts and finishes meanwhile
                monkeypatch.setattr(toy_trainer, "train_pair", write("fast"))
                toy_pair(progress=False, recipe=MICRO)
            target.mkdir()
            (target / "author").write_text(name)

        return train

    monkeypatch.setattr(toy_trainer, "train_pair", write("slow"))
    target, _ = toy_pair(progress=False, recipe=MICRO)
    assert (target / "author").read_text() == "fast"
    assert [folder.name for folder in tmp_path.iterdir()] == [target.parent.name]


def test_training_leaves_global_generators_and_threads_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("BILD_LAB_CACHE", str(tmp_path))
    threads, torch_state, python_state = torch.get_num_threads(), torch.get_rng_state(), random.getstate()
    toy_pair(progress=False, recipe=MICRO)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


def test_the_training_falls_to_one_thread_only_after_repeated_stalls():
    threads = torch.get_num_threads()
    watch = toy_trainer._YieldToOthers()
    try:
        torch.set_num_threads(2)
        for stall in range(1, 4):
            watch.on_step_begin(None, None, None)
            watch.started_s -= 2
            watch.on_step_end(None, None, None)
            assert torch.get_num_threads() == (1 if stall == 3 else 2)
    finally:
        torch.set_num_threads(threads)


def _must_not_run(*arguments):
    raise AssertionError("trained although it should not")
