"""Points whose policy is a server: beside the target, beside another server, with failures, started
by the policy.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import bild_lab
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.protocols import Served
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure import runner
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.decoder import BASELINE
from bild_lab.lab.point.prepare import Point, _require_one_template, prepare
from bild_lab.lab.schema.examples import read_examples
from bild_lab.lab.schema.result import Result
from bild_lab.lab.schema.statistics import best_at_loss
from bild_lab.lab.store.groups import by_setting
from bild_lab.lab.store.records import Sweep
from bild_lab.report.phrases import cautions
from bild_lab.report.provenance import notes
from tests.servers.fake_server import FakeServer, serving

PROMPTS = ["w5 w9 w12", "w7 w8", "w21 w5 w6", "w11 w5 w6"]
LIMIT = 12


@pytest.fixture
def llama(checkpoints: Path) -> str:
    return str(checkpoints / "llama")


@pytest.fixture
def point_of(llama: str, tmp_path: Path) -> Callable[..., Point]:
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"de": prompt, "en": "w7"}) + "\n" for prompt in PROMPTS))

    def point(url: str, *words: str) -> Point:
        return prepare(
            compose_config(
                [
                    "policy=server",
                    f"policy.url={url}",
                    f"pair.target={llama}",
                    "pair.draft=null",
                    "dataset=multi30k",
                    f"dataset.path={file}",
                    f"decoding.max_new_tokens={LIMIT}",
                    "measure.warmup=1",
                    "measure.repeats=2",
                    *words,
                ]
            )
        )

    return point


@pytest.fixture
def measured(tmp_path: Path) -> Callable[[Point], Result]:
    return lambda point: run_point(point, Sweep(tmp_path / "sweep"))


def fake(llama: str, *arguments: object) -> FakeServer:
    return FakeServer(bild_lab.load(llama, policy="vanilla"), *arguments)


def test_a_server_is_timed_in_turn_with_the_target_and_certified(
    llama: str,
    point_of: Callable[..., Point],
    measured: Callable[[Point], Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here = SimpleNamespace(since=lambda: 1.0)  # joules of this machine, and not of the server's
    monkeypatch.setattr(runner, "Energy", lambda device, device_map: here)
    with serving(fake(llama)) as url:
        result = measured(point_of(url, "measure.certify=true"))
    assert result.engine == "server" and result.agreement_with_target == 1.0
    assert result.joules_per_token is None
    assert result.baseline_drafted is None and "drafted too" not in cautions(result)
    certificate = result.certificate
    assert (certificate.equal, certificate.ties, certificate.defects) == (len(PROMPTS), 0, 0)
    assert result.speedup.value > 0 and result.first_token_s == result.streamed.first_token_p50
    assert result.counts.acceptance_rate == result.counts.accepted_share == pytest.approx(2 / 3)
    assert (result.streamed.errors, result.streamed.retries) == (0, 0)
    assert result.streamed.first_token_p50 <= result.streamed.first_token_p99
    assert result.environment.servers["method"]["version"] == "0.32.0"
    rows = read_examples(result.folder)
    assert [len(row.reports) for row in rows] == [2] * len(PROMPTS)


def test_another_models_text_is_a_defect(
    llama: str, point_of: Callable[..., Point], measured: Callable[[Point], Result]
) -> None:
    with serving(fake(llama, "vllm", "other text")) as url:
        result = measured(point_of(url, "measure.certify=true"))
    assert result.certificate.defects == len(PROMPTS) and result.change.changed == 1.0
    (note,) = (note for note in notes([result]) if "lossless" in note)
    assert note == (
        f"server (url {url.split('/')[2]}) does not say that it is lossless: 0 of its"
        f" {len(PROMPTS)} texts are the target’s own, 0 numerical ties, {len(PROMPTS)} defects."
    )


@pytest.mark.parametrize("dialect", ["vllm", "llama_cpp"])
def test_a_server_without_a_word_is_named_and_is_never_the_best(
    llama: str,
    point_of: Callable[..., Point],
    measured: Callable[[Point], Result],
    dialect: str,
) -> None:
    with serving(fake(llama, dialect, "no text")) as url:
        result = measured(point_of(url, "dataset.metric=length"))
    assert result.empty == 1.0 and result.baseline_empty == 0.0
    assert all(row.prediction == "" for row in read_examples(result.folder))
    assert result.doubt == "every text of the point is empty"
    assert "so neither speed nor quality says much" in cautions(result)
    (group,) = by_setting([result])
    assert group.front == [] and best_at_loss(group.results, 100.0) is None


@pytest.mark.parametrize("failed", [1, len(PROMPTS)])
def test_texts_that_never_came_are_errors_and_no_speed(
    llama: str,
    point_of: Callable[..., Point],
    measured: Callable[[Point], Result],
    failed: int,
) -> None:
    server = fake(llama, "vllm", "500")
    server.faults_left = 0
    with serving(server) as url:
        point = point_of(url, "measure.certify=true", "policy.attempts=1", "measure.warmup=0")
        server.faults_left = failed
        if failed == len(PROMPTS):
            server.faults_left = -1
            with pytest.raises(UserError, match="no text came.*the engine has died"):
                measured(point)
            return
        result = measured(point)
    assert result.streamed.errors == failed and result.certificate.unjudged == failed
    assert result.certificate.equal == len(PROMPTS) - failed and result.change.changed == 0.0
    assert (result.agreement_with_target, result.empty) == (1.0, 0.0)
    rows = read_examples(result.folder)
    answered_tokens = sum(len(row.token_ids) for row in rows if not row.reports[0]["error"])
    assert result.tokens == answered_tokens
    errors = [report["error"] for row in rows for report in row.reports if report["error"]]
    assert len(errors) == failed and "the engine has died" in errors[0]
    assert result.doubt == f"{failed} of {len(PROMPTS)} texts never came from the server"
    assert not any("sent to the server again" in note for note in notes([result]))
    (note,) = (note for note in notes([result]) if "never came" in note)
    assert "resume=false" in note and "template" not in note


def test_two_servers_are_compared_without_the_targets_weights(
    llama: str,
    point_of: Callable[..., Point],
    measured: Callable[[Point], Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(fake(llama, "llama_cpp")) as url, serving(fake(llama, "plain")) as baseline_url:
        point = point_of(url, f"policy.baseline_url={baseline_url}")
        load = NativeModel.load

        def load_in_the_server(model: NativeModel) -> None:
            assert threading.current_thread() is not threading.main_thread(), "weights were read"
            load(model)

        monkeypatch.setattr(NativeModel, "load", load_in_the_server)
        result = measured(point)
    assert point.decoders[BASELINE].method.url == baseline_url
    assert result.setting.baseline == "server" and result.speedup.value > 0
    assert result.change.changed == 0.0 and result.agreement_with_target is None
    assert result.counts.acceptance_rate is None and result.counts.drafted > 0
    assert set(result.environment.servers) == {"method", "baseline"}


def test_a_batch_is_timed_as_requests_at_once_beside_a_batch_of_the_target(
    llama: str, point_of: Callable[..., Point], measured: Callable[[Point], Result]
) -> None:
    server = fake(llama, "vllm", "slow")
    with serving(server) as url:
        result = measured(point_of(url, "runtime.batch=4", "measure.repeats=1"))
    assert server.most_at_work == 4 and result.setting.batch == 4
    assert result.change.changed == 0.0 and result.streamed.first_token_p50 >= 0.2
    assert result.latency_s.median >= 0.2  # each waits for its own


def test_one_server_is_compared_with_itself_by_another_body(
    llama: str, point_of: Callable[..., Point], measured: Callable[[Point], Result]
) -> None:
    server = fake(llama)
    with serving(server) as url:
        result = measured(point_of(url, "policy.baseline_body={speculative.n_max: 0}"))
    switched_off = [body.get("speculative.n_max") for body in server.requests]
    assert switched_off.count(0) == switched_off.count(None) > 0
    # the server knows no such field, and drafts on
    assert result.baseline_drafted == result.counts.drafted > 0
    assert "compared with drafted too" in cautions(result)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], {"min_p": 0.1}),
        (["policy.baseline_body={}"], {}),
        (["policy.baseline_body={n: 1}"], {"n": 1}),
    ],
)
def test_another_server_gets_the_same_fields_unless_it_has_its_own(
    point_of: Callable[..., Point], words: list[str], expected: dict[str, float]
) -> None:
    """Fault: it got none of policy.body, so that two servers sampled or thought differently."""
    fields = ["policy.baseline_url=http://127.0.0.1:8/v1", "policy.body={min_p: 0.1}", *words]
    point = point_of("http://127.0.0.1:9/v1", *fields)
    assert point.decoders[BASELINE].method._body == expected
    assert point.decoders["method"].method._body == {"min_p": 0.1}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["policy.arrival_rate=2"], "got runtime.batch=1"),
        (["policy.arrival_rate=2", "runtime.batch=4"], "the baseline here never waits"),
        (["policy.baseline_launch=program"], "policy.baseline_url=URL"),
    ],
)
def test_what_would_be_left_out_or_compared_unequally_is_refused(
    point_of: Callable[..., Point], words: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        point_of("http://127.0.0.1:9/v1", *words)


@pytest.mark.parametrize("template", ["template=chat", "template=vicuna_short"])
def test_a_prompt_gets_no_chat_template_of_the_server_around_another_one(
    point_of: Callable[..., Point], template: str
) -> None:
    """Planted: the text of one template as the question of another, without its special tokens."""
    words = ["policy.baseline_url=http://127.0.0.1:8/v1", "policy.chat=true"]
    assert point_of("http://127.0.0.1:9/v1", *words).decoders["method"].method.chat
    with pytest.raises(UserError, match="around each prompt, which has one already"):
        point_of("http://127.0.0.1:9/v1", *words, template)
    with pytest.raises(UserError, match="holds the turns before it, got dataset.turns=2"):
        point_of("http://127.0.0.1:9/v1", *words, "dataset.turns=2", "dataset.metric=agreement")
    words[-1] = "policy.chat=false"
    if template != "template=chat":  # which the tokenizer here has not
        assert point_of("http://127.0.0.1:9/v1", *words, template)


@pytest.mark.parametrize("word", ["measure.certify=true", "dataset.metric=log_probability"])
def test_what_needs_the_target_is_refused_beside_another_server(
    point_of: Callable[..., Point], word: str
) -> None:
    """Planted: a remedy that is set already, such as measure.baseline=vanilla."""
    with pytest.raises(UserError, match=rf"^{word} .*; leave out policy\.baseline_url"):
        point_of("http://127.0.0.1:9/v1", "policy.baseline_url=http://127.0.0.1:8/v1", word)
    assert point_of("http://127.0.0.1:9/v1", word)


@pytest.mark.slow
def test_a_server_is_started_its_log_stays_with_the_point_and_it_ends(
    llama: str, point_of: Callable[..., Point], measured: Callable[[Point], Result]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = f"{sys.executable} -m tests.servers.fake_server {port} {llama}"
    point = point_of(f"http://127.0.0.1:{port}/v1", f"policy.launch='{command}'")
    result = measured(point)
    method = point.decoders["method"].method
    assert result.change.changed == 0.0 and method.cpu_seconds() > 0
    assert "asked /v1/completions" in (result.folder / "method_server.log").read_text()
    method._process.stop()
    assert not method._process.alive


def test_a_server_that_does_not_start_says_what_its_log_says(
    point_of: Callable[..., Point], measured: Callable[[Point], Result]
) -> None:
    command = f"{sys.executable} -c 'raise SystemExit(\"no weights here\")'"
    point = point_of("http://127.0.0.1:9/v1")
    point.decoders["method"].method.launch = command
    with pytest.raises(RuntimeError, match="no weights here"):
        measured(point)


def test_a_method_of_ones_own_that_asks_a_server_need_not_know_of_chats() -> None:
    """Planted: what `Served` does not have was read of it."""

    class OwnServer:
        arrival_rate = None

        def ask(self) -> None: ...
        def read(self) -> None: ...
        def about(self) -> None: ...
        def log(self) -> None: ...

    assert isinstance(OwnServer(), Served)
    _require_one_template(SimpleNamespace(method=OwnServer()), SimpleNamespace())
