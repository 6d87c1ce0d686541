"""`bild_lab.load` and every policy of conf/policy on both families of models."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import bild_lab
from bild_lab.engine.decode import DraftThenVerify
from bild_lab.engine.models.device import set_threads
from bild_lab.engine.request import Request
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_policy
from bild_lab.lab.config.policies import describe_decoder, policy_label
from bild_lab.lab.point import load as load_module
from bild_lab.lab.point.shared_models import SharedModels
from bild_lab.lab.point.streaming import stable_prefix
from tests.engine.vocabularies.foreign import foreign_module
from tests.policies import GREEDY_ONLY, RUNNABLE, is_lossless, load
from tests.tiny import relative_of, save, tiny_llama

PROMPT = "w5 w9 w30 w12"


def transformers_greedy(folder: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """What a user gets from Transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    auto = AutoModelForSeq2SeqLM if "t5" in folder.name else AutoModelForCausalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    inputs = tokenizer(prompt, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    out = model.generate(**inputs, max_new_tokens=max_new_tokens, do_sample=False)[0].tolist()
    return out[1:] if model.config.is_encoder_decoder else out[inputs["input_ids"].shape[1] :]


POLICIES = list(dict.fromkeys(policy for policy, _ in RUNNABLE))


def on_one_family(case: tuple[str, str]) -> bool:
    """Whether it is a policy's only case in the fast tests: policies take turns."""
    policy = case[0]
    cases = [runnable for runnable in RUNNABLE if runnable[0] == policy]
    return case == cases[POLICIES.index(policy) % len(cases)]


@pytest.mark.parametrize(
    ("policy", "family"),
    [
        pytest.param(*case, marks=[] if on_one_family(case) else [pytest.mark.slow])
        for case in RUNNABLE
    ],
)
def test_every_policy_decodes_within_its_limits_and_repeats(
    checkpoints: Path, policy: str, family: str
) -> None:
    decoder = load(checkpoints, family, policy)
    for max_new_tokens in (1, 2, 7, 25):
        result = decoder.generate(PROMPT, max_new_tokens=max_new_tokens)
        assert 1 <= len(result.token_ids) <= max_new_tokens
        ended = decoder.target.checkpoint.end_tokens & set(result.token_ids[:-1])
        assert not ended, "tokens behind an end token"
        assert result.token_ids == decoder.generate(PROMPT, max_new_tokens=max_new_tokens).token_ids


@pytest.mark.fast("layer_skip-llama", "prompt_lookup-t5")
@pytest.mark.parametrize(
    ("policy", "family"),
    [(policy, family) for policy, family in RUNNABLE if is_lossless(policy)],
)
def test_lossless_policies_give_the_tokens_of_transformers(
    checkpoints: Path, policy: str, family: str
) -> None:
    decoder = load(checkpoints, family, policy)
    for prompt in (PROMPT, "w7", "w39 w38 w3 w3 w20 w21 w22 w23 w24"):
        expected = transformers_greedy(checkpoints / family, prompt, 20)
        assert decoder.generate(prompt, max_new_tokens=20).token_ids == expected


@pytest.mark.fast(
    "alpha",
    "block_verification",
    "calm",
    "hf_generate",
    "lookahead",
    "speculative",
    "speculative_cascade",
    "typical_acceptance",
)
@pytest.mark.parametrize(
    "policy", sorted({name for name, family in RUNNABLE if family == "llama"} - GREEDY_ONLY)
)
def test_every_policy_samples_reproducibly(checkpoints: Path, policy: str) -> None:
    decoder = load(checkpoints, "llama", policy)
    texts = [
        decoder.generate(PROMPT, max_new_tokens=25, temperature=1.0, seed=seed).token_ids
        for seed in (3, 3, 4)
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]


@pytest.mark.parametrize("batch", [1, 2])
def test_each_prompt_of_a_list_draws_for_itself(checkpoints: Path, batch: int) -> None:
    """Samples of one prompt are no copies; the first is the prompt's own alone."""
    decoder = load(checkpoints, "llama", "speculative")
    sampled = {"max_new_tokens": 25, "temperature": 1.0, "seed": 3}
    several = [one.token_ids for one in decoder.generate([PROMPT] * 4, batch=batch, **sampled)]
    assert several[0] == decoder.generate(PROMPT, **sampled).token_ids
    assert len(set(map(tuple, several))) == 4
    for wrong in ({"seed": -1}, {"seed": 1.5}, {"batch": 0}):
        with pytest.raises(UserError, match=f"{next(iter(wrong))} .*whole number"):
            decoder.generate([PROMPT], **wrong)


def test_a_result_tells_text_tokens_rounds_and_stages(checkpoints: Path) -> None:
    result = load(checkpoints, "t5", "bild", fallback=0.2, rollback=1.5).generate(
        PROMPT, max_new_tokens=16
    )
    words = [f"w{token}" for token in result.token_ids if token > 2]
    assert result.text.split() == words
    assert result.latency_s > sum(result.trace.stages_s.values()) > 0
    emitted = [
        token
        for each in result.trace.rounds
        for token in (*each.drafted[: each.accepted], each.next_token)
    ]
    assert emitted[: len(result.token_ids)] == result.token_ids
    assert all(len(each.stats["distance"]) == len(each.drafted) for each in result.trace.rounds)


def test_a_policy_that_drafts_asks_for_a_draft_model(checkpoints: Path) -> None:
    with pytest.raises(UserError, match="policy speculative drafts with a small model; give one"):
        bild_lab.load(target=str(checkpoints / "t5"), policy="speculative")
    assert (
        bild_lab.load(target=str(checkpoints / "t5"), policy="vanilla")
        .generate(PROMPT, 3)
        .token_ids
    )


def test_models_are_shared_between_decoders(checkpoints: Path) -> None:
    first, second = load(checkpoints, "t5", "bild"), load(checkpoints, "t5", "speculative")
    assert first.target is second.target


def test_wrong_pairs_fail_before_any_weight_is_read(checkpoints: Path) -> None:
    with pytest.raises(
        UserError, match=r"that share 0 pieces; check .*choose another draft model$"
    ):
        bild_lab.load(
            target=str(checkpoints / "llama"),
            draft=str(checkpoints / "llama-words"),
            dtype="float16",
        )
    fresh = bild_lab.load(target=str(checkpoints / "llama"), policy="vanilla", dtype="float16")
    assert "module" not in vars(fresh.target)


@pytest.fixture(scope="module")
def foreign_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """llama, and a drafter with other words in another order; in both w3 is a word like all
    others.
    """
    folder, target = tmp_path_factory.mktemp("models"), tiny_llama(1)
    module, words = foreign_module(relative_of(target, 2, noise=0.05), seed=3)
    return str(save(target, folder / "llama", unknown="<pad>")), str(
        save(module, folder / "foreign", words, "<pad>")
    )


def test_a_draft_model_may_have_another_vocabulary(foreign_pair: tuple[str, str]) -> None:
    target, draft = foreign_pair
    expected = bild_lab.load(target, policy="vanilla").generate(PROMPT, 25).token_ids
    policies = {"speculative": {}, "bild": {"rollback": 0.69}, "speculative_tree": {}}
    for policy, knobs in policies.items():
        result = bild_lab.load(target, draft, policy, **knobs).generate(PROMPT, 25)
        assert result.token_ids == expected
        assert result.trace.accepted > 0


def test_a_draft_model_of_another_kind_is_refused(checkpoints: Path) -> None:
    with pytest.raises(
        UserError,
        match="must be of one kind, got .*t5 .an encoder–decoder. and .*llama .decoder-only",
    ):
        bild_lab.load(str(checkpoints / "t5"), str(checkpoints / "llama"), "speculative")


def test_processors_see_the_targets_tokens(foreign_pair: tuple[str, str]) -> None:
    never = [{"_target_": "transformers.NoRepeatNGramLogitsProcessor", "ngram_size": 1}]
    target, draft = foreign_pair
    expected = (
        bild_lab.load(target, policy="vanilla", processors=never).generate(PROMPT, 25).token_ids
    )
    assert expected != bild_lab.load(target, policy="vanilla").generate(PROMPT, 25).token_ids
    decoder = bild_lab.load(target, draft, "speculative", processors=never)
    assert decoder.generate(PROMPT, 25).token_ids == expected


def test_a_composition_is_described_and_changes_are_marked() -> None:
    policy = compose_policy("bild", {"fallback": 0.5})
    node = OmegaConf.to_container(OmegaConf.create({"policy": policy}).policy.decoder, resolve=True)
    assert describe_decoder(node) == "ModelDrafter(window=10, stop=0.5) + Rollback(threshold=2.0)"
    assert policy_label(policy) == "bild"
    policy.decoder.drafter.window = 3
    assert policy_label(policy) == "bild (changed: drafter.window)"
    policy.decoder.acceptance = {
        "_target_": "bild_lab.engine.methods.speculative.sampling.SpeculativeSampling"
    }
    assert (
        policy_label(policy)
        == "bild (changed: drafter.window, acceptance._target_, acceptance.threshold)"
    )


@pytest.mark.parametrize(
    "prompt",
    [
        *(5, None, [None], [5.0], [True], {"role": "user"}, [[5], None], {5, 6}),
        *(b"w5", bytearray(b"w5"), memoryview(b"w5"), [b"w5"]),
    ],
)
def test_what_is_no_prompt_is_refused_in_words(prompt: object, checkpoints: Path) -> None:
    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla")
    for use in (decoder.generate, decoder.stream):
        with pytest.raises(
            UserError, match="a prompt is text, token ids or the messages of a chat"
        ):
            list(use(prompt))


def test_rows_of_padded_token_ids_are_refused(checkpoints: Path) -> None:
    decoder, row = bild_lab.load(checkpoints / "llama", policy="vanilla"), torch.tensor([2, 5, 9])
    wanted = decoder.generate([2, 5, 9], 6).token_ids
    assert (
        decoder.generate(row, 6).token_ids == decoder.generate(row.numpy(), 6).token_ids == wanted
    )
    assert decoder.generate([row, [2, 5]], 6)[0].token_ids == wanted
    for one_row in (row[None], row[None].numpy()):  # which needs no padding
        assert [text.token_ids for text in decoder.generate(one_row, 6)] == [wanted]
    for rows in (row.repeat(2, 1), row.repeat(2, 1).numpy(), torch.tensor(5)):
        with pytest.raises(UserError, match=r"are one row, got an array of shape \("):
            decoder.generate(rows, 6)


def test_a_decoder_says_in_one_line_what_it_is(checkpoints: Path) -> None:
    target, draft = checkpoints / "llama", checkpoints / "llama-draft"
    decoder = bild_lab.load(target, draft, policy="speculative", engine="native")
    models = f"target={target}, draft={draft}"
    assert repr(decoder) == f"Decoder(policy=speculative, {models}, engine=native, dtype=float32)"
    assert {"load", "load_results", "run", "Decoder", "Generation", "__version__"} <= set(
        dir(bild_lab)
    )


def test_a_method_that_cannot_stream_gives_its_text_in_one_piece(checkpoints: Path) -> None:
    """Without the prompt."""
    decoder = load(checkpoints, "llama", "hf_generate")
    assert list(decoder.stream(PROMPT, 8)) == [decoder.generate(PROMPT, 8).text]


def test_stop_strings_of_a_call_or_of_the_decoder_end_text_stream_and_batch(
    checkpoints: Path,
) -> None:
    target = checkpoints / "llama"
    whole = bild_lab.load(target, policy="vanilla").generate("w5 w9", 20).text
    words = whole.split()
    stop = f"{words[4]} {words[5][:1]}"
    for decoder, options in (
        (bild_lab.load(target, policy="vanilla", stop=[stop]), {}),
        (bild_lab.load(target, policy="vanilla"), {"stop": stop}),
    ):
        found = decoder.generate("w5 w9", 20, **options)
        assert found.text == whole[: whole.index(stop)] and len(found.token_ids) < 20
        assert "".join(decoder.stream("w5 w9", 20, **options)) == found.text
        together = decoder.generate(["w5 w9", "w7"], 20, batch=2, **options)
        assert (together[0].text, together[0].token_ids) == (found.text, found.token_ids)
    unstopped = bild_lab.load(target, policy="vanilla", stop=[stop]).generate("w5 w9", 20, stop=[])
    assert unstopped.text == whole
    with pytest.raises(
        UserError, match="stop must be a text or a list of texts, none of them empty"
    ):
        bild_lab.load(target, policy="vanilla", stop=[""])


@pytest.mark.parametrize("knob", [{"top_p": 0.9}, {"top_k": 5}])
def test_what_limits_draws_is_refused_where_nothing_is_drawn(
    knob: dict[str, float], checkpoints: Path
) -> None:
    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla")
    for use in (decoder.generate, decoder.stream):
        with pytest.raises(
            UserError,
            match=r"has no effect without sampling.*set decoding=sample, or decoding.top_",
        ):
            list(use([2, 5], 4, **knob))
    assert decoder.generate([2, 5], 4, temperature=1.0, **knob).token_ids


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("你好世界", (), "你好世界"),
        ("one two", (), "one two"),
        ("one two\ufffd\ufffd", (), "one two"),
        ("one two ", (), "one two"),  # a full stop may follow
        ("one can n", (), "one can"),
        ("one do n", (), "one"),  # do not becomes don't
        ("one '", (), "one"),
        ("one Quest", ("Question:",), "one"),
        ("one\n", ("\n\n",), "one"),
        ("one\n", (), "one\n"),
    ],
)
def test_a_stream_holds_back_only_what_may_still_change(
    text: str, stop: tuple[str, ...], shown: str
) -> None:
    assert stable_prefix(text, stop).rstrip(" ") == shown


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_text_keeps_the_indentation_that_a_program_begins_with(
    family: str, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = load(checkpoints, family, "vanilla")
    checkpoint_class = type(decoder.target.checkpoint)
    monkeypatch.setattr(checkpoint_class, "continuation", lambda *_: "    return 1\n")
    assert decoder.text([5]) == "    return 1\n"
    assert decoder.scored_text([5]) == "    return 1"


def test_threads_are_those_of_the_process(checkpoints: Path) -> None:
    before = torch.get_num_threads()
    try:
        bild_lab.load(checkpoints / "llama", policy="vanilla", threads=3)
        assert torch.get_num_threads() == 3
        set_threads(None)
        assert torch.get_num_threads() == 3
        with pytest.raises(UserError, match="runtime.threads must be a whole number >= 1"):
            bild_lab.load(checkpoints / "llama", policy="vanilla", threads=0)
        for threads in (0, -1):  # of commands whose configuration has no schema
            with pytest.raises(UserError, match="runtime.threads must be a whole number >= 1"):
                set_threads(threads)
    finally:
        torch.set_num_threads(before)


def test_a_policy_of_ones_own_folder_is_loaded_with_its_knobs(
    checkpoints: Path, tmp_path: Path
) -> None:
    (tmp_path / "policy").mkdir()
    own = tmp_path / "policy/mine.yaml"
    own.write_text("defaults:\n  - speculative\n  - _self_\nname: mine\nwindow: 2\n")
    pair = {"target": checkpoints / "llama", "draft": checkpoints / "llama-draft"}
    decoder = bild_lab.load(**pair, policy="mine", config_dir=tmp_path, lenience=0.5)
    assert "policy=mine" in repr(decoder)
    assert max(len(each.drafted) for each in decoder.generate(PROMPT, 20).trace.rounds) == 2
    own.write_text(own.read_text().replace("window: 2", "window: 4"))
    again = bild_lab.load(**pair, policy="mine", config_dir=tmp_path)
    assert max(len(each.drafted) for each in again.generate(PROMPT, 20).trace.rounds) > 2
    with pytest.raises(UserError, match=r"policy must be one of .* mine, .* got 'mien'; did you"):
        bild_lab.load(**pair, policy="mien", config_dir=tmp_path)
    with pytest.raises(UserError, match="policy mine has no knob 'windw'"):
        bild_lab.load(**pair, policy="mine", config_dir=tmp_path, windw=3)
    with pytest.raises(UserError, match="config_dir must be a folder"):
        bild_lab.load(**pair, policy="mine", config_dir=tmp_path / "none")
    (tmp_path / "policy/bild.yaml").write_text("name: bild\n")
    with pytest.raises(UserError, match=r"bild\.yaml has the name of a file that is shipped"):
        bild_lab.load(**pair, policy="bild", config_dir=tmp_path)


def test_a_policy_is_composed_of_policies_of_ones_own_folder(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "one's own"  # as it may be named
    (folder / "policy").mkdir(parents=True)
    (folder / "policy/mine.yaml").write_text("defaults:\n  - suffix\n  - _self_\nname: mine\n")
    knobs = {"first": "mine", "second": "mine", "min_depth": 3}
    decoder = bild_lab.load(checkpoints / "llama", policy="hybrid", config_dir=folder, **knobs)
    assert decoder.generate(PROMPT, 4).trace.rounds
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for place in ("one's own", "~/one's own"):
        bild_lab.load(checkpoints / "llama", policy="mine", config_dir=place)
    with pytest.raises(
        UserError, match="policy must be one of .* got 'mine'"
    ):  # it was for one load
        bild_lab.load(checkpoints / "llama", policy="hybrid", **knobs)
    bild_lab.load(checkpoints / "llama", policy="mine", config_dir=folder)
    with pytest.raises(UserError, match="policy must be one of .* got 'mine'"):
        compose_policy("mine")


def test_a_method_that_leaves_the_prompt_out_is_refused_and_its_text_not_cut(
    checkpoints: Path,
) -> None:
    class Headless(DraftThenVerify):
        def decode(self, request: Request, trace: Trace) -> list[int]:
            return super().decode(request, trace)[request.limits.prompt_length :]

    decoder = bild_lab.load(checkpoints / "llama", policy="vanilla")
    method = Headless(decoder.target, decoder.method.drafter, decoder.method.acceptance)
    with pytest.raises(UserError, match="decode of Headless must return the list of the prompt's"):
        replace(decoder, method=method).generate(PROMPT, 4)


def test_each_model_has_the_revision_of_its_own_key(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, str | None] = {}

    def without_revision(path: str, revision: str | None, *rest: Any, **options: Any) -> Any:
        seen[Path(path).name] = revision
        return real(path, None, *rest, **options)

    real = load_module.load_model
    monkeypatch.setattr(load_module, "load_model", SharedModels(without_revision))
    pair = {"target": checkpoints / "llama", "draft": checkpoints / "llama-draft"}
    revisions = {"target_revision": "a1", "draft_revision": "b2"}
    bild_lab.load(**pair, policy="speculative", **revisions)
    assert seen == {"llama": "a1", "llama-draft": "b2"}


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"engine": "kernels", "compile": "true"}, "the kernels need no compiler"),
        ({"engine": "kernels", "dtype": "float64"}, "the kernels cannot run: "),
    ],
)
def test_what_an_engine_cannot_do_is_refused_and_not_left_out(
    checkpoints: Path, options: dict[str, Any], told: str
) -> None:
    pair = {"target": checkpoints / "llama", "draft": checkpoints / "llama-draft"}
    with pytest.raises(UserError, match=told):
        bild_lab.load(**pair, policy="speculative", **options)


def test_a_class_that_is_no_method_is_refused_by_what_it_lacks(checkpoints: Path) -> None:
    rule = {"_target_": "bild_lab.engine.acceptance.ExactMatch"}
    policy = OmegaConf.create({"policy": {"name": "mine", "decoder": rule}}).policy
    with pytest.raises(UserError, match="of policy mine, a ExactMatch, lacks engine; a method has"):
        bild_lab.load(target=checkpoints / "llama", policy=policy)


@pytest.mark.parametrize(
    ("part", "path", "refusal"),
    [
        (
            "drafter",
            "acceptance.ExactMatch",
            "protocols.Drafter, got ExactMatch, which lacks draft",
        ),
        (
            "acceptance",
            "drafters.NoDraft",
            "protocols.Acceptance, got NoDraft, which lacks accepts",
        ),
    ],
)
def test_a_part_of_another_kind_is_told_as_such(
    part: str, path: str, refusal: str, checkpoints: Path
) -> None:
    policy = OmegaConf.create({"policy": compose_policy("vanilla")}).policy
    policy.decoder[part] = {"_target_": f"bild_lab.engine.{path}"}
    with pytest.raises(UserError, match=f"the {part} of DraftThenVerify must be a .*{refusal}"):
        bild_lab.load(target=checkpoints / "llama", policy=policy)


class Reading:
    """A part that reads a file with a number."""

    def __init__(self, file: str) -> None:
        float(Path(file).read_text())


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        (None, r"Reading: .*No such file or directory.*; got Reading\(file=.*numbers.txt\)"),
        ("many", "Reading: could not convert string to float: 'many'; got Reading"),
    ],
)
def test_what_a_part_of_ones_own_refuses_is_told_in_its_words(
    content: str | None, refusal: str, checkpoints: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "numbers.txt").write_text(content)
    part = {"_target_": f"{__name__}.Reading", "file": str(tmp_path / "numbers.txt")}
    policy = OmegaConf.create({"policy": {"name": "mine", "decoder": part}}).policy
    with pytest.raises(UserError, match=refusal):
        bild_lab.load(target=checkpoints / "llama", policy=policy)


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        ("class Own: ==", r"cannot find own\.Own: SyntaxError: invalid syntax \(own\.py, line 1\)"),
        ("import missing", "cannot find own.Own: ModuleNotFoundError: No module named 'missing'"),
        ("class Owl: ...", r"cannot find own\.Own: .*; did you mean Owl\?; give the dotted path"),
        ("Own = torch.nn", r"NameError: .* not defined \(own\.py, line 1, in <module>\); give the"),
        ("def Own(model): ...", "'model'; got .*; target, draft, second_draft come by"),
        ("def Own(): 1 + None", r"'NoneType'; got Own\(\); own\.py, line 1, in Own$"),
    ],
)
def test_why_a_part_of_ones_own_cannot_be_built_is_told(
    source: str, refusal: str, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own", raising=False)
    policy = OmegaConf.create(
        {"policy": {"name": "mine", "decoder": {"_target_": "own.Own"}}}
    ).policy
    with pytest.raises(UserError, match=refusal):
        bild_lab.load(target=checkpoints / "llama", policy=policy)


def test_pieces_of_a_tokenizer_that_cannot_write_a_letter(checkpoints: Path) -> None:
    """One without a token for unknown text reads the letter as nothing."""
    decoder = load(checkpoints, "llama", "vanilla")
    pieces = decoder.pieces([5, 9])
    words = BPE({"<s>": 2, **{f"w{index}": index for index in range(3, 40)}}, [])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), bos_token="<s>")
    assert tokenizer.encode("a", add_special_tokens=False) == []
    vars(decoder.target.checkpoint)["tokenizer"] = tokenizer
    assert decoder.pieces([5, 9, 2]) == {**pieces, 2: "<s>"}
