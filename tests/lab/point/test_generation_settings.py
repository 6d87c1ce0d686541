"""What `decoding.processors` takes, what it refuses, and what it tells."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig, MBart50Tokenizer, NoRepeatNGramLogitsProcessor

from bild_lab.engine.logits_processors import sampling_settings, score_settings
from bild_lab.engine.models.checkpoint.loaded_checkpoint import LoadedCheckpoint
from bild_lab.errors import UserError, warn_once
from bild_lab.lab.config.schemas import DecodingSpec, PairSpec, RuntimeSpec, typed
from bild_lab.lab.point import load as loading
from bild_lab.lab.point.languages import Languages, warn_of_what_is_left_out
from bild_lab.lab.point.load import load
from bild_lab.lab.point.processors import processors_of, stop_of
from tests.policies import shipped
from tests.tiny_architectures import build, word_tokenizer

NGRAM = {"_target_": "transformers.NoRepeatNGramLogitsProcessor", "ngram_size": 3}
FORCED = {"forced_bos_token_id": 0, "num_beams": 4, "min_length": 56, "no_repeat_ngram_size": 3}


def checkpoint(**said: Any) -> LoadedCheckpoint:
    made = LoadedCheckpoint("some/bart", module=build("bart"), loaded_tokenizer=word_tokenizer())
    vars(made)["generation"] = GenerationConfig(**said)
    return made


@pytest.fixture(autouse=True)
def told_anew() -> None:
    warn_once.cache_clear()


def test_none_and_a_silent_checkpoint_change_nothing() -> None:
    silent = checkpoint(
        max_new_tokens=20, do_sample=True, temperature=0.6, num_beams=4, repetition_penalty=1.0
    )
    assert not processors_of("none", checkpoint(**FORCED))
    assert not processors_of("checkpoint", silent)
    assert (
        load((build("llama"), word_tokenizer()), policy=shipped("vanilla"))
        .request([5], 4)
        .source.processors
        is None
    )


def test_a_checkpoint_asks_for_what_generate_would_follow() -> None:
    assert score_settings(checkpoint(**FORCED).generation) == {
        "forced_bos_token_id": 0,
        "no_repeat_ngram_size": 3,
        "min_length": 56,
    }


def test_a_list_holds_objects_or_their_configurations() -> None:
    own = NoRepeatNGramLogitsProcessor(3)
    assert processors_of([own], checkpoint()).added == (own,)
    (built,) = processors_of([NGRAM], checkpoint()).added
    assert isinstance(built, NoRepeatNGramLogitsProcessor) and built.ngram_size == 3


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("all", "must be checkpoint, none, or a list .*, got 'all'"),
        (None, "must be checkpoint, none, or a list"),
        ([], "must be checkpoint, none, or a list"),
        (3, "must be checkpoint, none, or a list"),
        (["none"], "must list logits processors, each with its _target_, got 'none'"),
        ([{**NGRAM, "ngram_size": -1}], "decoding.processors: .*ngram_size.* strictly positive"),
        ([{**NGRAM, "size": 1}], "NoRepeatNGramLogitsProcessor has no parameter 'size'"),
        ([{"_target_": "transformers.GenerationConfig"}], "must list logits processors"),
        ([{"_target_": "transformers.Nothing"}], "cannot find transformers.Nothing"),
        ([{"_target_": "os.system", "command": "true"}], "belongs to Python itself"),
    ],
)
def test_what_is_no_list_of_processors_is_refused(wanted: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        processors_of(wanted, checkpoint())


def test_processors_that_run_the_model_again_are_refused() -> None:
    with pytest.raises(
        UserError, match="must depend on the text and its scores alone, got guidance_scale"
    ):
        processors_of("checkpoint", checkpoint(guidance_scale=1.5))
    guided = {
        "_target_": "transformers.ClassifierFreeGuidanceLogitsProcessor",
        "guidance_scale": 1.5,
    }
    with pytest.raises(
        UserError, match="got ClassifierFreeGuidanceLogitsProcessor, which runs the model again"
    ):
        processors_of([guided], checkpoint())


@pytest.mark.parametrize(
    "said", [{"encoder_repetition_penalty": 1.5}, {"encoder_no_repeat_ngram_size": 2}]
)
def test_processors_of_sources_are_refused_where_these_have_another_vocabulary(
    said: dict[str, Any],
) -> None:
    """Fault: a token of the source that the text's vocabulary lacks ended in a traceback."""
    translator = checkpoint(**said, repetition_penalty=1.5)
    vars(translator)["one_vocabulary"] = False
    with pytest.raises(UserError, match=f"some/bart asks for {next(iter(said))}, which looks for"):
        processors_of("checkpoint", translator)
    vars(translator)["one_vocabulary"] = True
    assert processors_of("checkpoint", translator)


def test_a_translator_without_a_language_is_told_loudly(caplog: pytest.LogCaptureFixture) -> None:
    translator = checkpoint()
    vars(translator)["tokenizer"] = MBart50Tokenizer(
        vocab=[("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    )
    warn_of_what_is_left_out("none", Languages(), translator)
    (message,) = caplog.messages
    assert message == "NO TARGET LANGUAGE: some/bart may write any; set pair.target_language"
    warn_of_what_is_left_out("none", Languages(target="de_DE"), translator)
    assert len(caplog.messages) == 1


def test_what_generate_would_follow_is_named(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"stop_strings": ["w31"], "num_beams": 4, "min_length": 5, "max_length": 20}
    warn_of_what_is_left_out("none", Languages(), checkpoint(**settings))
    asked, left_out = caplog.messages
    assert (
        asked
        == "some/bart asks for min_length, stop_strings; decoding.processors=checkpoint follows it"
    )
    assert left_out.startswith("some/bart sets num_beams for `generate`, which is left out")
    warn_once.cache_clear()
    warn_of_what_is_left_out([NGRAM], Languages(), checkpoint(**settings))
    assert caplog.messages[-1].startswith("some/bart sets num_beams, stop_strings for `generate`")
    before = len(caplog.messages)
    warn_of_what_is_left_out("checkpoint", Languages(), checkpoint(stop_strings=["w31"]))
    assert len(caplog.messages) == before


def test_what_a_checkpoint_samples_with_is_named_where_texts_are_sampled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said = checkpoint(do_sample=True, min_p=0.3, typical_p=1.0, epsilon_cutoff=0.1)
    warn_of_what_is_left_out("checkpoint", Languages(), said)
    assert caplog.messages == []
    warn_of_what_is_left_out("checkpoint", Languages(), said, sampled=True)
    (message,) = caplog.messages
    assert message.startswith("some/bart asks for min_p, epsilon_cutoff where it samples, which is")
    warn_once.cache_clear()
    chosen = [{"_target_": "transformers.MinPLogitsWarper", "min_p": 0.3}]
    warn_of_what_is_left_out(chosen, Languages(), said, sampled=True)  # planted: told to add it
    assert len(caplog.messages) == 1


def test_whether_texts_are_sampled_follows_from_the_temperature(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(
        loading, "warn_of_what_is_left_out", lambda *_, sampled: told.append(sampled)
    )
    pair = PairSpec("mine", str(checkpoints / "llama"), None)
    for temperature in (0.0, 0.7):
        decoding = DecodingSpec(4, temperature=temperature)
        loading.decoder_of(shipped("vanilla"), pair, decoding, typed(RuntimeSpec, {}, "runtime"))
    assert told == [False, True]


@pytest.mark.parametrize(
    ("name", "off", "on"),
    [
        ("min_p", 0.0, 0.05),
        ("typical_p", 1.0, 0.9),
        ("epsilon_cutoff", 0.0, 0.1),
        ("eta_cutoff", 0.0, 0.1),
        ("top_h", 1.0, 0.5),
    ],
)
def test_a_setting_of_sampling_counts_where_it_leaves_out_tokens(
    name: str, off: float, on: float
) -> None:
    assert sampling_settings(checkpoint(**{name: off}).generation) == {}
    assert sampling_settings(checkpoint(**{name: on}).generation) == {name: on}


def test_a_checkpoints_stop_strings_are_followed_with_its_processors() -> None:
    said = checkpoint(stop_strings=["w31", "w5"])
    wanted = DecodingSpec(1, stop="w5", processors="checkpoint")
    assert stop_of(wanted, said) == ("w5", "w31")
    assert stop_of(replace(wanted, processors="none"), said) == ("w5",)


def test_other_engines_are_refused_processors(checkpoints: Path, fake_engines: Path) -> None:
    with pytest.raises(
        UserError, match="openvino knows neither processors nor target languages here; set"
    ):
        load(str(checkpoints / "llama"), policy=shipped("openvino"), processors=[NGRAM])
