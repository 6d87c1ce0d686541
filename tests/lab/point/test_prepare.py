"""What decides a point's name: everything that can change its numbers, and nothing else."""

from __future__ import annotations

import json
import re
import shutil
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from bild_lab.engine.methods import hf_generation
from bild_lab.engine.methods.hf_generation import HuggingFaceGenerate
from bild_lab.engine.methods.vanilla import NoDraft
from bild_lab.engine.session import Model
from bild_lab.errors import UserError
from bild_lab.files import FilePath
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.score import baseline_is_target
from bild_lab.lab.metrics import quality
from bild_lab.lab.metrics.writing import splitter_name
from bild_lab.lab.point import identity
from bild_lab.lab.point import prepare as module
from bild_lab.lab.point.prepare import Point, prepare
from bild_lab.lab.store import code as code_module
from bild_lab.lab.store import hashing
from tests.engine.methods.modules.tiny import random_adapter
from tests.tiny import tiny_llama


@pytest.fixture(scope="module")
def base(checkpoints: Path, data: Path) -> list[str]:
    pair = [f"pair.target={checkpoints / 't5'}", f"pair.draft={checkpoints / 't5-draft'}"]
    return [*pair, "dataset=multi30k", f"dataset.path={data}"]


@pytest.fixture(scope="module")
def plain(base: list[str]) -> str:
    return name_of(*base)


def name_of(*words: str) -> str:
    """The name of the point that these overrides give."""
    module.cached_examples.cache_clear()
    return prepare(compose_config(list(words))).id


def test_what_a_template_keeps_of_answers_is_part_of_the_setting_and_told_to_the_target(
    checkpoints: Path, tmp_path: Path
) -> None:
    target, rows = tmp_path / "chats", tmp_path / "rows.jsonl"
    shutil.copytree(checkpoints / "llama", target)
    (target / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content if whole or m.role == 'user' else m.content[:9] }} "
        "{% endfor %}"
    )
    rows.write_text(json.dumps({"prompt_id": 1, "category": "writing", "prompt": ["w5", "w6"]}))
    words = [f"pair.target={target}", "template=chat", f"dataset.path={rows}", "policy=vanilla"]
    words += ["dataset=mt_bench", "dataset.limit=1"]
    told = "+dataset.chat_template_kwargs={whole: true}"
    plain_point, point = (
        prepare(compose_config(all_words)) for all_words in (words, [*words, told])
    )
    assert point.vanilla.chat.values == {"whole": True}
    assert point.setting["chat_template_kwargs"] == {"whole": True}
    assert "chat_template_kwargs" not in plain_point.setting and point.id != plain_point.id
    alone = prepare(compose_config([*words, told, "dataset.turns=1"]))
    assert "chat_template_kwargs" not in alone.setting  # its text says all


@pytest.mark.parametrize(
    "word",
    [
        "policy.window=3",
        "policy=vanilla",
        "dataset.limit=3",
        "dataset.max_source_tokens=4",
        "dataset.prompt_template='w5 {source}'",
        "dataset.metric=rouge",
        "dataset.metrics=[bleu,chrf]",
        "dataset.cut=[w4]",
        "decoding.max_new_tokens=7",
        "decoding=sample",
        "decoding.processors=checkpoint",
        (
            "decoding.processors=[{_target_: transformers.NoRepeatNGramLogitsProcessor,"
            " ngram_size: 3}]"
        ),
        "measure.repeats=1",
        "measure.warmup=0",
        "measure.precision=0.05",
        "measure.baseline=null",
        "measure.traced_examples=1",
        "measure.certify=true",
        "measure.margin=5",
        "measure.target_log_probability=false",
        "runtime.dtype=bfloat16",
        "runtime.engine=hf",
        "runtime.compile_drafter=false",
        "runtime.threads=2",
        "runtime.seed=1",
        "runtime.weights=4",
        "pair.draft_weights=8",
    ],
)
def test_every_setting_that_can_change_a_number_changes_the_name(
    base: list[str], plain: str, word: str
) -> None:
    assert name_of(*base, word) != plain


@pytest.fixture(scope="module")
def asked(base: list[str]) -> Point:
    """A point for which much was asked."""
    words = [
        "name=held",
        "policy=speculative",
        "policy.window=3",
        "decoding=sample",
        "decoding.temperature=0.7",
        "decoding.top_k=5",
        "decoding.top_p=0.5",
        "dataset.max_source_tokens=40",
        "measure.warmup=3",
        "runtime.batch=2",
        "runtime.seed=4",
        "runtime.device=cpu",
        "runtime.threads=3",
        "runtime.compile_drafter=false",
        "resume=false",
    ]
    return prepare(compose_config([*base, *words]))


def test_a_point_holds_what_it_was_asked_for(asked: Point) -> None:
    assert (asked.name, asked.policy, asked.batch, asked.seed) == ("held", "speculative", 2, 4)
    assert asked.knobs["window"] == 3 and asked.knobs["stop_confidence"] is None
    assert asked.composition == "ModelDrafter(window=3) + SpeculativeSampling(lenience=1.0)"
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.7, 5, 0.5)
    assert asked.decoding.temperature == 0.7
    assert asked.specs.dataset.max_source_tokens == 40 and not asked.resume
    assert list(asked.decoders) == ["method", "baseline"]
    assert asked.vanilla.method.target is asked.vanilla.target is asked.decoders["baseline"].target


def test_a_points_setting_says_what_was_asked_for_and_what_was_found(asked: Point) -> None:
    named = (
        "target draft second_draft source_language target_language dataset split prompt_template"
        " chat_template"
    )
    measured = (
        "metric dtype compile batch device threads processors decoding seed repeats warmup baseline"
    )
    found = "max_source_tokens n_examples data weights engine code hardware compile_drafter"
    assert set(asked.setting) == {*named.split(), *measured.split(), *found.split()}
    told = {
        "dataset": "multi30k",
        "batch": 2,
        "seed": 4,
        "warmup": 3,
        "max_source_tokens": 40,
        "compile": "false",
        "compile_drafter": "false",
        "device": "cpu",
        "threads": 3,
    }
    assert {key: asked.setting[key] for key in told} == told
    assert asked.setting["code"].split(" ")[1::2] == list(identity.PACKAGES)
    assert asked.setting["n_examples"] == len(asked.examples) > 0


def test_a_point_for_which_nothing_is_asked_resumes_and_decodes_one_text_at_a_time(
    base: list[str],
) -> None:
    plain = prepare(compose_config(base))
    assert plain.resume and plain.batch == 1 and "batch" not in plain.setting
    assert plain.setting["threads"] == identity.DEFAULT_THREADS


def test_the_baseline_of_greedy_points_alone_is_the_target(base: list[str], asked: Point) -> None:
    assert baseline_is_target(prepare(compose_config(base)))
    assert not baseline_is_target(prepare(compose_config([*base, "measure.baseline=speculative"])))
    assert not baseline_is_target(asked)  # which samples


def test_a_name_is_made_of_these_parts(base: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A part under another key would measure every finished point again."""
    seen: list[dict] = []
    monkeypatch.setattr(identity, "content_hash", lambda parts: seen.append(parts) or "a name")
    point = prepare(
        compose_config([*base, "policy=speculative", "measure.certify=true", "dataset.cut=[w5,w4]"])
    )
    parts = (
        "policies setting traced_examples certify target_log_probability metrics categories weights"
        " external code"
    )
    assert point.id == "a name" and set(seen[-1]) == set(parts.split())
    assert seen[-1]["certify"] is True and seen[-1]["categories"] == [
        one.category for one in point.examples
    ]
    assert seen[-1]["setting"] == {
        key: value
        for key, value in point.setting.items()
        if key not in ("target", "draft", "second_draft")
    }
    assert point.setting["stop"] == ["w4", "w5"] and "stop" not in point.setting["decoding"]
    assert {decoder.stop for decoder in (*point.decoders.values(), point.vanilla)} == {("w5", "w4")}
    prepare(compose_config([*base, "dataset.metrics=[bleu,chrf]"]))
    assert seen[-1]["metrics"] == {"chrf": ""}
    assert not {"tokenize", "language"} & set(seen[-1]["setting"])
    prepare(compose_config([*base, "dataset.tokenize=char", "dataset.language=de"]))
    assert (seen[-1]["setting"]["tokenize"], seen[-1]["setting"]["language"]) == ("char", "de")
    monkeypatch.setattr(quality, "require_metric_works", lambda *_: None)
    prepare(compose_config([*base, "dataset.metric=rougeLsum"]))
    assert seen[-1]["metrics"] == {"rougeLsum": f"{splitter_name()} {version('nltk')}"}
    prepare(compose_config([*base, "dataset.metric=evaluate:exact_match"]))
    assert seen[-1]["metrics"] == {"evaluate:exact_match": f"{version('evaluate')} "}


def test_a_likelihood_that_leads_must_be_measured(base: list[str]) -> None:
    words = [*base, "dataset.metric=log_probability", "dataset.reference_column=null"]
    assert (
        prepare(compose_config([*words, "measure.target_log_probability=true"])).scoring.lead
        == "log_probability"
    )
    with pytest.raises(
        UserError, match=r"log_probability needs measure\.target_log_probability=true"
    ):
        prepare(compose_config([*words, "measure.target_log_probability=false"]))


def test_the_packages_of_a_peer_are_a_part_of_the_name(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Peer(HuggingFaceGenerate):
        """From Python 3.12 on a class that was once taken for a peer is taken for one ever after."""

        precision = "float32"

        def cpu_seconds(self) -> float:
            return 0.0

    names = set()
    monkeypatch.setattr(hf_generation, "HuggingFaceGenerate", Peer)
    for versions in ({"peer": "1"}, {"peer": "2"}):
        monkeypatch.setattr(Peer, "versions", versions, raising=False)
        seen: list[dict] = []
        with monkeypatch.context() as patched:
            patched.setattr(
                identity, "content_hash", lambda parts, seen=seen: seen.append(parts) or "a name"
            )
            prepare(compose_config([*base, "policy=hf_generate"]))
        assert seen[-1]["external"] == [versions]
        names.add(name_of(*base, "policy=hf_generate"))
    assert len(names) == 2


def test_a_policy_without_batches_is_refused_from_two_texts_on(base: list[str]) -> None:
    assert name_of(*base, "policy=hf_assisted", "runtime.batch=1")
    with pytest.raises(UserError, match="hf_assisted"):
        name_of(*base, "policy=hf_assisted", "runtime.batch=2")


REFUSED = {  # what is wrong with the configuration, before a weight is read
    "decoding.top_p=1.5": "decoding.top_p",
    "decoding.top_k=0": "decoding.top_k",
    "policy.fallback=1.5": "1.5",
    "policy.rollback=0": "rollback",
    "policy.window=0": "window",
    "pair.draft=/nowhere/model": "/nowhere/model",
    "pair.draft=null": "pair.draft",
    "dataset.path=/nowhere": "/nowhere",
    "runtime.engine=abacus": "runtime.engine",
    "runtime.device=abacus": "runtime.device",
    "runtime.dtype=int3": "runtime.dtype",
    "decoding.processors=much": "decoding.processors",
    "pair.target_language=de": "pair.target_language",
    "resume=perhaps": "resume",
    "measure.precision=5": "measure.precision must lie in (0, 1], got 5",
    "measure.quiet=-1": "measure.quiet",
    "+measure={precision: 0.1, baseline: null}": "measure.precision needs a baseline",
    "measure.baseline=vanila": "measure.baseline=vanila: policy must be one of ",
    "+measure={precision: 0.1, most_repeats: 2}": "at least 2 and measure.repeats, got",
}


@pytest.mark.parametrize("word", REFUSED)
def test_what_cannot_be_measured_is_refused_with_the_key_at_fault(
    base: list[str], word: str
) -> None:
    with pytest.raises(UserError, match=re.escape(REFUSED[word])):
        prepare(compose_config([*base, "decoding=sample", word]))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["policy=hybrid", "policy.second=ngram"],
            "set table=outputs/ngrams/table.safetensors; policy hybrid has no such knob; those of its"
            " drafters are set in policy.first_knobs={table:…} or policy.second_knobs={table:…}",
        ),
        (["policy=bild_hybrid", "policy.first=ngram"], "policy bild_hybrid has no such knob"),
        (["policy=ngram"], "set policy.table=outputs/ngrams/table.safetensors"),
        # a message that two policies share, each with one of its knobs
        (["policy=bild", "policy.fallback=2"], "got 2; it is a probability; 0 never ends a draft"),
    ],
)
def test_a_knob_of_a_drafter_inside_a_policy_is_named_where_it_is_set(
    base: list[str], words: list[str], said: str
) -> None:
    with pytest.raises(UserError, match=f"{re.escape(said)}$"):
        prepare(compose_config([*base, *words]))


def test_a_baseline_that_needs_other_knobs_than_its_file_has_says_so(base: list[str]) -> None:
    said = (
        r"^measure\.baseline=truncation: truncation needs a bar, .* for others name a file of your"
    )
    with pytest.raises(UserError, match=said):
        name_of(*base, "measure.baseline=truncation", "policy=truncation", "policy.top_k=2")


def test_greedy_text_is_certified_beside_the_target_alone_and_a_sampled_one_beside_any(
    base: list[str],
) -> None:
    words = [*base, "measure.certify=true", "measure.baseline=speculative"]
    with pytest.raises(
        UserError, match=r"measure\.certify compares greedy text with the target's own"
    ):
        name_of(*words)
    assert name_of(*words, "decoding=sample")


def test_agreement_needs_a_baseline(base: list[str]) -> None:
    assert name_of(*base, "dataset.metric=agreement")
    with pytest.raises(UserError, match="dataset.metric=agreement compares with a baseline"):
        name_of(*base, "dataset.metric=agreement", "measure.baseline=null")


def test_facts_are_those_of_the_folder_that_a_variable_names(
    checkpoints: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_ADAPTER", str(tmp_path / "adapter"))
    base = [
        f"pair.target={checkpoints / 'llama'}",
        "pair.draft=null",
        "dataset=multi30k",
        f"dataset.path={data}",
    ]
    direct = prepare(compose_config([*base, "policy=bita", adapted(tmp_path / "adapter")]))
    named = prepare(compose_config([*base, "policy=bita", "policy.adapter='${oc.env:MY_ADAPTER}'"]))
    assert (
        direct.facts == named.facts and direct.facts["trained"]["adapter"] and direct.id == named.id
    )


@pytest.mark.parametrize("group", ["pair", "decoding", "runtime", "measure", "dataset"])
def test_an_unknown_key_is_told_with_its_group(base: list[str], group: str) -> None:
    with pytest.raises(UserError, match=f"^{group} has no key 'abacus'"):
        prepare(compose_config([*base, f"+{group}.abacus=1"]))


def test_what_changes_no_number_leaves_the_name(
    base: list[str], data: Path, tmp_path: Path
) -> None:
    moved = shutil.copytree(data, tmp_path / "moved")
    ours = [
        "name=other",
        "resume=false",
        "pair.name=other",
        f"dataset.path={moved}",
        "policy.rollback=2",
    ]
    assert name_of(*base, *ours) == name_of(*base, "policy.rollback=2.0")


def test_a_folder_with_a_slash_behind_it_is_the_same_model(base: list[str]) -> None:
    """As a shell completes its name."""
    pair = {word.partition("=")[0]: word for word in base[:2]}
    slashed = prepare(compose_config([*base, *(f"{word}/" for word in pair.values())]))
    assert slashed.setting == prepare(compose_config(base)).setting


def test_other_weights_of_target_or_drafter_give_another_name(
    base: list[str], checkpoints: Path
) -> None:
    """Whether or not the policy drafts, a drafter that it does not use counts for nothing."""
    drafting, alone = "policy=speculative", "policy=vanilla"
    other = f"pair.draft={checkpoints / 't5'}"
    assert name_of(*base, drafting, other) != name_of(*base, drafting)
    assert name_of(*base, alone, other) == name_of(*base, alone)
    assert name_of(*base, alone, f"pair.target={checkpoints / 't5-draft'}") != name_of(*base, alone)


def test_revisions_of_a_drafter_are_settings_of_their_own_and_leave_the_name(
    base: list[str],
) -> None:
    """Folders have no revisions: a point is known by its content."""
    plain, early, late = (
        prepare(compose_config([*base, "policy=speculative", *words]))
        for words in ([], ["pair.draft_revision=step1"], ["pair.draft_revision=step2"])
    )
    assert "draft_revision" not in plain.setting
    assert [point.setting["draft_revision"] for point in (early, late)] == ["step1", "step2"]
    assert plain.id == early.id == late.id


def test_other_hardware_gives_another_name(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = name_of(*base)
    monkeypatch.setattr(identity, "hardware", lambda device_map, device: "another")
    assert name_of(*base) != before


def test_a_baseline_with_other_knobs_gives_another_name(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*base, "measure.baseline=speculative"]
    before, compose = name_of(*words), module.compose_policy
    changed = {"speculative": {"window": 2}}  # as if its file had changed
    monkeypatch.setattr(module, "compose_policy", lambda name: compose(name, changed.get(name)))
    assert name_of(*words) != before


def adapted(folder: Path, seed: int = 0) -> str:
    random_adapter(tiny_llama(0).config, seed=seed).save(folder)
    return f"policy.adapter={folder}"


def test_an_adapter_counts_with_its_content_wherever_it_lies(
    checkpoints: Path, data: Path, tmp_path: Path
) -> None:
    target = f"pair.target={checkpoints / 'llama'}"
    base = [target, "pair.draft=null", "dataset=multi30k", f"dataset.path={data}", "policy=bita"]
    here = name_of(*base, adapted(tmp_path / "here"))
    assert name_of(*base, adapted(tmp_path / "there")) == here
    assert name_of(*base, adapted(tmp_path / "there", seed=1)) != here


@pytest.mark.fast("words1")
@pytest.mark.parametrize(
    "words", [("policy=ppd",), ("policy=speculative_cascade", "policy.rule=chow")]
)
def test_a_folder_with_the_name_of_a_word_counts_for_nothing(
    words: tuple[str, ...],
    checkpoints: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    pair = [f"pair.target={checkpoints / 'llama'}", f"pair.draft={checkpoints / 'llama-draft'}"]
    base = [*pair, "dataset=multi30k", f"dataset.path={data}", *words]
    before = name_of(*base)
    for word in ("shared", "chow"):
        (tmp_path / word).mkdir()
        (tmp_path / word / "heads_config.json").write_text("{}")
    assert name_of(*base) == before


def test_the_code_that_a_policy_reaches_counts(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own alone, so that a changed rule leaves the points of other policies, and the group that
    they share.
    """
    rule, real = "bild_lab.engine.methods.bild", hashing.code_hash
    before = {
        policy: prepare(compose_config([*base, f"policy={policy}"]))
        for policy in ("bild", "speculative")
    }
    monkeypatch.setattr(
        hashing,
        "code_hash",
        lambda reached, **notebook: "other" if rule in reached else real(reached, **notebook),
    )
    after = {policy: prepare(compose_config([*base, f"policy={policy}"])) for policy in before}
    assert [before[one].id == after[one].id for one in before] == [False, True]
    assert before["bild"].setting == after["bild"].setting == {**before["speculative"].setting}


def test_a_knob_that_names_a_file_counts_with_its_content_whatever_it_is_called(
    base: list[str], tmp_path: Path
) -> None:
    """Which one it is, the annotation of the part's parameter says."""
    file = tmp_path / "words.txt"
    own = {"name": "mine", "lexicon": str(file), "comment": str(file)}
    part = {
        "_target_": "tests.lab.point.test_prepare.WithLexicon",
        "lexicon": "${policy.lexicon}",
        "comment": "a",
    }
    own["decoder"] = {"_target_": "bild_lab.engine.decode.DraftThenVerify", "drafter": part}
    own["decoder"]["acceptance"] = {
        "_target_": "bild_lab.engine.methods.speculative.sampling.SpeculativeSampling"
    }
    ids = []
    for content in ("one", "two"):
        file.write_text(content)
        cfg = compose_config(base)
        cfg.policy = own
        ids.append(prepare(cfg).id)
    moved = shutil.copy(file, tmp_path / "moved.txt")
    cfg.policy.lexicon = cfg.policy.comment = str(moved)
    assert ids[0] != ids[1] == prepare(cfg).id


class WithLexicon(NoDraft):
    def __init__(self, target: Model, lexicon: FilePath, comment: str) -> None:
        super().__init__(target)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (("policy=speculative",), True),
        (("policy=speculative", "policy.lenience=1", "policy.name=mine"), True),
        (("policy=speculative", "policy.window=2"), False),
        (("policy=speculative_adaptive",), False),
        (("policy=speculative", "measure.baseline=null"), False),
    ],
)
def test_the_baseline_is_known_by_its_knobs(
    base: list[str], words: tuple[str, ...], same: bool
) -> None:
    module.cached_examples.cache_clear()
    assert (
        prepare(compose_config([*base, "measure.baseline=speculative", *words])).same_as_baseline
        is same
    )


def test_another_script_of_a_local_metric_gives_another_name(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(quality, "require_metric_works", lambda metric, *_: loaded.append(metric))
    (tmp_path / "own").mkdir()
    (script := tmp_path / "own" / "own.py").write_text("first")
    words = [*base, f"dataset.metric=evaluate:{tmp_path / 'own'}"]
    before = name_of(*words)
    assert name_of(*words) == before
    script.write_text("second")
    assert name_of(*words) != before
    assert loaded == [f"evaluate:{tmp_path / 'own'}"] * 3  # before anything is decoded


@pytest.mark.parametrize(
    "word", ["dataset.metric=own_scores.close", "dataset.metrics=[bleu,own_scores.close]"]
)
def test_other_code_of_a_metric_of_ones_own_gives_another_name_and_another_group(
    base: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a partial of another module's function, whose own module is Python's."""
    (tmp_path / "shared_scores.py").write_text("def near(text, references, scale): return scale")
    own = tmp_path / "own_scores.py"
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("shared_scores", "own_scores"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    points = []
    for scale in (0.5, 1.0):
        own.write_text(
            "from functools import partial\nfrom shared_scores import near\n"
            f"close = partial(near, scale={scale})\nclose.scale = 1\n"
        )
        code_module.reread_sources()
        points.append(prepare(compose_config([*base, word])))
    first, second = points
    assert first.id != second.id
    differing = {key for key in first.setting if first.setting[key] != second.setting[key]}
    assert differing == {"metric_code"}
    assert "metric_code" not in prepare(compose_config(base)).setting


def test_what_runs_code_is_refused_unless_it_was_allowed(
    base: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quality, "require_metric_works", lambda *_: None)
    program = "dataset.reference_template='{answer}'"
    with pytest.raises(UserError, match=r"allow it with measure\.run_code=true"):
        name_of(*base, "dataset.metric=pass_at_1", program)
    assert name_of(*base, "dataset.metrics=[bleu,pass_at_1]", program, "measure.run_code=true")
    with pytest.raises(
        UserError, match=r"evaluate:some/one is no local folder, and a community metric is .* code"
    ):
        name_of(*base, "dataset.metric=evaluate:some/one")
    assert name_of(*base, "dataset.metric=evaluate:some/one", "runtime.trust_remote_code=true")
