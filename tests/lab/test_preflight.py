"""What is checked and decided about a whole sweep before its first point is measured."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from bild_lab.errors import UserError
from bild_lab.lab import preflight
from bild_lab.lab.config.compose import alternatives, compose_config
from bild_lab.lab.config.entrypoint import FAILED_POINTS, Refused
from bild_lab.lab.point.identity import sweep_folder
from bild_lab.lab.point.read_model import load_model
from bild_lab.lab.preflight import (
    MOST_CHECKED,
    NO_GRAPHS,
    check_points,
    points_to_check,
    refusing_points,
    require_hydras_folder,
    require_one_folder,
    require_own_values,
    share_graph_regime,
    swept_values,
)
from tests.pretended import pretended_gpu

TOY = [["pair=toy"], ["dataset=toy"], ["dataset.limit=2"]]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def values(key: str, *several: object) -> list[str]:
    return [f"{key}={value}" for value in several]


@pytest.mark.fast(
    "lists0-policy.rollback=-4: ",
    "lists1-policy=speculative ",
    "lists5-policy=vanilla: ",
    "lists6-dataset.path=nowhere: ",
    "lists9-policy=synthetic: ",
    "lists11-decoding.temperature=0: measure.certify",
    "lists12-runtime.engine=abacus: ",
)
@pytest.mark.parametrize(
    ("lists", "named"),
    [
        (
            [values("policy.fallback", 0.3, 0.5), values("policy.rollback", 1, 2, -4)],
            "policy.rollback=-4: ",
        ),
        (
            [
                values("policy", "vanilla", "speculative"),
                ["pair.draft=toy:small", "pair.draft=null"],
            ],
            "policy=speculative ",
        ),
        ([values("dataset.limit", 2, 0)], "dataset.limit=0: "),
        ([values("decoding.temperature", 0, -1)], "decoding.temperature=-1: "),
        # the first lacks the knob
        ([values("policy", "vanilla", "bild"), values("policy.fallback", 0.5)], ""),
        ([values("policy", "bild", "vanilla"), values("policy.fallback", 0.5)], "policy=vanilla: "),
        ([values("dataset.path", "toy:corpus", "nowhere")], "dataset.path=nowhere: "),
        (
            [["policy=bild_released"], values("decoding.temperature", 0, 1)],
            "decoding.temperature=1: ",
        ),
        (
            [["decoding=sample"], values("policy", "bild", "bild_released")],
            "policy=bild_released: ",
        ),
        ([["decoding=sample"], values("policy", "bild", "synthetic")], "policy=synthetic: "),
        (
            [["policy=hf_generate"], ["runtime.batch=2"], values("decoding.temperature", 0, 1)],
            "decoding.temperature=1: batched generate",
        ),
        (
            [
                ["measure.certify=true"],
                ["measure.baseline=speculative"],
                values("decoding.temperature", 1, 0),
            ],
            "decoding.temperature=0: measure.certify",
        ),
        ([["logger=none"], values("runtime.engine", "auto", "abacus")], "runtime.engine=abacus: "),
    ],
)
def test_a_later_point_that_cannot_be_measured_is_refused_and_named(
    lists: list[list[str]], named: str
) -> None:
    with pytest.raises(Refused) as refused:
        check_points([*TOY, ["policy=bild"], *lists], "config")
    assert refused.value.message.startswith(named)
    assert not Path("outputs").exists(), "nothing is written"


@pytest.mark.parametrize("rates", [(2, "null"), ("null", 2)])
def test_a_point_that_is_not_to_be_compared_with_its_baseline_is_refused_wherever_it_stands(
    rates: tuple[object, object], checkpoints: Path
) -> None:
    """Fault: of a later point that differs in knobs the method was checked alone."""
    pair = [[f"pair.target={checkpoints / 'llama'}"], ["pair.draft=null"]]
    server = [["policy=server"], ["policy.url=http://127.0.0.1:9/v1"], ["runtime.batch=4"]]
    with pytest.raises(Refused) as refused:
        check_points([*pair, *TOY[1:], *server, values("policy.arrival_rate", *rates)], "config")
    assert "the baseline here never waits" in refused.value.message
    assert refused.value.message.startswith("policy.arrival_rate=2: ") == (rates[1] == 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["logger=wandb", "logger.mode=disabled"], "logger mode wants online or offline"),
        (["+report.unknown=1"], "report"),
    ],
)
def test_what_is_written_of_a_sweep_is_checked_too(words: list[str], message: str) -> None:
    with pytest.raises(Refused) as refused:
        check_points([*TOY, ["policy=bild"], *([word] for word in words)], "config")
    assert refused.value.message.startswith(message)


def test_a_sweep_that_a_newer_version_has_written_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def newer(_: object) -> None:
        raise UserError("written by a newer version")

    monkeypatch.setattr(preflight.Sweep, "all_results", newer)
    with pytest.raises(Refused) as refused:
        check_points([*TOY, ["policy=bild"]], "config")
    assert refused.value.message == "written by a newer version"


def test_the_files_of_each_point_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    def own_files(config: DictConfig) -> None:
        if config.policy.fallback == 0.2:
            raise UserError("a file of another project")

    monkeypatch.setattr(preflight, "require_own_files", own_files)
    with pytest.raises(Refused) as refused:
        check_points([*TOY, ["policy=bild"], values("policy.fallback", 0.1, 0.2)], "config")
    assert refused.value.message == "policy.fallback=0.2: a file of another project"


def test_a_file_of_answers_is_looked_up_at_each_point(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[float] = []
    monkeypatch.setattr(preflight, "replays", lambda policy: True)
    monkeypatch.setattr(
        preflight, "requests_of", lambda point, _: looked_up.append(point.knobs["fallback"])
    )
    check_points([*TOY, ["policy=bild"], values("policy.fallback", 0.1, 0.2, 0.3)], "config")
    assert looked_up == [0.1, 0.2, 0.3]


def test_prompts_of_later_turns_are_not_known_before_their_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, later = SimpleNamespace(continues=None), SimpleNamespace(continues="an answer")
    checked: list[object] = []
    monkeypatch.setattr(preflight, "prepare", lambda _: SimpleNamespace(examples=[first, later]))
    monkeypatch.setattr(preflight, "requests_of", lambda _, examples: checked.extend(examples))
    check_points([*TOY, ["policy=bild"]], "config")
    assert checked == [first]


def test_a_fault_of_ours_ends_the_command_with_its_traceback(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        refusing_points(lambda: 1 / 0)
    assert ended.value.code == FAILED_POINTS and "ZeroDivisionError" in capsys.readouterr().err


def test_a_process_has_one_logger() -> None:
    config = compose_config(["logger=none"])
    assert preflight.logger(config) is preflight.logger(compose_config(["logger=none"]))


def test_values_that_another_sweeper_finds_on_its_way_are_not_known() -> None:
    sweeper = {"_target_": "hydra_plugins.optuna.OptunaSweeper", "params": {"a": "1,2"}}
    assert swept_values(OmegaConf.create({"hydra": {"sweeper": sweeper}})) is None


@pytest.mark.parametrize(
    ("folder", "subfolder", "told"),
    [
        ("outputs/mine", ".", None),
        ("HERE/outputs/mine", ".", None),
        ("outputs/other", ".", "hydra.sweep.dir=outputs/other would hold no result"),
        ("outputs/mine", "${hydra:job.num}", r"hydra.sweep.subdir=\$\{hydra:job.num\} would hold"),
    ],
)
def test_hydras_own_folder_is_that_of_the_results(
    folder: str, subfolder: str, told: str | None
) -> None:
    place = {"dir": folder.replace("HERE", str(Path.cwd())), "subdir": subfolder}
    config = OmegaConf.create({"name": "mine", "hydra": {"sweep": place}})
    if told is None:
        require_hydras_folder(config, "sweep")
    else:
        with pytest.raises(UserError, match=told):
            require_hydras_folder(config, "sweep")


def test_points_that_differ_in_knobs_read_the_data_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = []
    prepare = preflight.prepare
    monkeypatch.setattr(preflight, "prepare", lambda cfg: prepared.append(cfg) or prepare(cfg))
    knobs = [values("policy.fallback", 0.1, 0.2, 0.3), values("policy.rollback", 1, 2)]
    configs = check_points([*TOY, ["policy=bild"], *knobs], "config")
    assert len(prepared) == 1
    found = {(one.policy.fallback, one.policy.rollback) for one in configs}
    assert found == {(fallback, rollback) for fallback in (0.1, 0.2, 0.3) for rollback in (1, 2)}


@pytest.mark.parametrize(
    ("lists", "prepared", "tokenized"),
    [
        (
            [
                values("runtime.seed", *range(5)),
                ["decoding=sample"],
                values("decoding.temperature", 0.5, 1),
            ],
            1,
            1,
        ),
        ([values("runtime.threads", 1, 2), values("measure.repeats", 1, 2)], 4, 1),
        ([values("decoding.max_new_tokens", 4, 5), values("runtime.seed", 0, 1)], 2, 2),
        # another policy may have a drafter that reads shorter texts
        ([values("policy", "bild", "speculative")], 2, 2),
        # new prompts, whatever else is new beside them
        ([values("runtime.threads", 1, 2), values("decoding.max_new_tokens", 4, 5)], 4, 3),
    ],
)
def test_what_points_share_is_checked_once(
    lists: list[list[str]], prepared: int, tokenized: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for name in ("prepare", "requests_of"):
        real = getattr(preflight, name)
        monkeypatch.setattr(
            preflight, name, lambda *given, name=name, real=real: calls.append(name) or real(*given)
        )
    check_points([*TOY, ["policy=bild"], *lists], "config")
    assert (calls.count("prepare"), calls.count("requests_of")) == (prepared, tokenized)


def test_of_many_points_each_value_and_each_combination_of_files_is_checked() -> None:
    jobs = [
        values("policy", "a", "b"),
        values("pair", "c", "d"),
        values("policy.x", *range(40)),
        values("seed.y", *range(40)),
    ]
    found = points_to_check(jobs)
    assert (
        found[0] == tuple(several[0] for several in jobs) and len(found) == len(set(found)) < 2 * 84
    )
    assert {word for words in found for word in words} == {
        word for several in jobs for word in several
    }
    assert {words[:2] for words in found} == {(one, other) for one in jobs[0] for other in jobs[1]}
    square = [values("policy.x", *range(10)), values("policy.y", *range(10))]
    assert len(points_to_check(square)) == 1 + 9 + 9
    few = [values("policy", "a", "b"), values("policy.x", *range(MOST_CHECKED // 2))]
    assert len(points_to_check(few)) == math.prod(map(len, few)) == MOST_CHECKED


@pytest.mark.parametrize(
    "word", ["policy.fallback=interval(0,1)", "policy.fallback=range(0.1,0.5,0.1),0.9"]
)
def test_values_that_cannot_be_listed_are_refused_in_words(word: str) -> None:
    (override,) = OverridesParser.create().parse_overrides([word])
    with pytest.raises(
        UserError, match=r"the values of policy\.fallback=.* cannot be listed; a sweep takes"
    ):
        alternatives(override)


def test_each_value_of_an_added_key_is_added() -> None:
    (override,) = OverridesParser.create().parse_overrides(["+mine.window=3,5"])
    assert alternatives(override) == ["+mine.window=3", "+mine.window=5"]


def test_a_sweep_has_one_folder() -> None:
    config, other = (compose_config([f"name={name}"]) for name in ("first", "second"))
    require_one_folder(config, [config, config])
    with pytest.raises(
        UserError, match="one report, got name=second beside outputs/first; give one name=NAME"
    ):
        require_one_folder(config, [config, other])


def hydras_part(words: list[str], params: dict[str, str], **choices: str) -> DictConfig:
    """What Hydra says of a command or of a point, with the lists of values that its files have."""
    return OmegaConf.create(
        {
            "hydra": {
                "overrides": {"task": words},
                "sweeper": {"params": params},
                "runtime": {"choices": choices},
            }
        }
    )


def test_of_several_experiments_the_one_with_lists_of_its_own_is_named() -> None:
    """Fault: an experiment chooses a policy, and that was named in its place. Lists whose keys the
    command gives were refused, too.
    """
    words, params = ["experiment=lossy,lossless", "policy.fallback=0.1,0.2"], {"pair": "a,b"}
    usual = {"policy": "bild", "experiment": "null", "pair": "toy"}
    command = hydras_part(words, params, **usual)
    of_point = ["pair=a", "experiment=lossless", "policy.fallback=0.1"]
    chosen = {"policy": "speculative", "experiment": "lossless", "pair": "a"}

    def point(**lists: str) -> DictConfig:
        return hydras_part(
            of_point, params | {f"policy.{key}": lists[key] for key in lists}, **chosen
        )

    require_own_values(command, [point(), point(fallback="0.3,0.4")])
    with pytest.raises(
        UserError,
        match=r"^pair=a experiment=lossless has lists .* for each pair and experiment, with",
    ):
        require_own_values(command, [point(), point(window="3,6")])
    single = hydras_part(["pair=a", *words], {}, **usual)
    with pytest.raises(
        UserError, match="^experiment=lossless has lists .* for each experiment, with"
    ):
        require_own_values(single, [point(window="3,6")])


def test_a_sweep_is_named_by_the_time_that_it_began() -> None:
    words = ["name=${now:%H-%M-%S-%f}"]
    config, later = compose_config(words), compose_config(words)
    assert sweep_folder(later) != sweep_folder(compose_config(words))
    require_one_folder(config, [later])
    assert sweep_folder(later) == sweep_folder(config)


def overrides() -> DictConfig:
    """A command's configuration as Hydra passes it, which cannot be written to."""
    config = OmegaConf.create({"hydra": {"overrides": {"task": ["policy=…"]}}})
    OmegaConf.set_readonly(config, True)
    return config


@pytest.mark.parametrize(
    ("words", "added"),
    [
        (["policy=bild", "policy=calm"], [NO_GRAPHS]),
        (["policy=ppd", "policy=speculative"], [NO_GRAPHS]),
        (["policy=bild", "policy=speculative"], []),  # all with graphs
        (["policy=calm", "policy=ppd"], []),  # all without
        # as it was asked for
        (["policy=bild runtime.compile=graphs", "policy=calm runtime.compile=false"], []),
        (["policy=bild runtime.compile=graphs", "policy=calm"], []),
        (["policy=bild runtime.device=cpu", "policy=calm runtime.device=cpu"], []),
    ],
)
def test_a_sweep_on_a_gpu_has_one_regime(words: list[str], added: list[str]) -> None:
    config, base = (
        overrides(),
        ["pair=toy", "dataset=toy", "dataset.limit=2", "runtime.device=cuda"],
    )
    with pretended_gpu():
        share_graph_regime(config, [compose_config([*base, *one.split()]) for one in words])
    load_model.cache_clear()
    assert config.hydra.overrides.task == ["policy=…", *added]
