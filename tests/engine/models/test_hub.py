"""The hub reachable, unreachable, silent, or known only from its cache."""

from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest

from bild_lab.engine.models.checkpoint import hub
from bild_lab.engine.models.checkpoint.hub import hub_problem, offline_hub, require_hub
from bild_lab.errors import UserError
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from tests.loopback_hub import load_in_a_fresh_process, loopback_hub

ROWS = b'{"translation": {"de": "Ja", "en": "Yes"}}\n{"translation": {"de": "Nein", "en": "No"}}\n'


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    switches = (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "HF_DATASETS_OFFLINE",
        "HF_ENDPOINT",
        "HF_HUB_CACHE",
        "HF_DATASETS_CACHE",
    )
    names = (*switches, "http_proxy", "https_proxy", "all_proxy", "no_proxy")
    for name in names:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def closed_port() -> int:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return unused.getsockname()[1]


def silent_name_server(*_: object, **__: object) -> None:
    time.sleep(2)
    raise socket.gaierror("Temporary failure in name resolution")


def test_a_listening_endpoint_is_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    with loopback_hub({}) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        require_hub("model 't5-small'", "give a local folder")


def test_a_name_server_that_never_answers_costs_no_more_than_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(socket, "create_connection", silent_name_server)
    monkeypatch.setattr(hub, "PROBE_TIMEOUT_S", 0.1)
    began = time.perf_counter()
    assert hub_problem() == "huggingface.co:443 cannot be reached (no answer in 0.1 s)"
    assert time.perf_counter() - began < 1


def test_a_hub_behind_a_proxy_is_asked_for_at_the_proxy(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://hub.invalid:{closed_port}")
    with loopback_hub({}) as proxy:
        monkeypatch.setenv("http_proxy", proxy)
        assert hub_problem() is None
        monkeypatch.setenv("no_proxy", "hub.invalid")
        assert hub_problem().startswith(f"hub.invalid:{closed_port} cannot be reached")


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://huggingface.co", "http://hub:port"])
def test_an_endpoint_that_is_no_url_is_refused(
    monkeypatch: pytest.MonkeyPatch, endpoint: str
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    with pytest.raises(UserError, match="must be a URL such as https://huggingface.co, got"):
        hub_problem()


def test_the_offline_switch_is_turned_back() -> None:
    import huggingface_hub.constants as constants

    before = constants.HF_HUB_OFFLINE
    with pytest.raises(KeyError), offline_hub():
        assert constants.is_offline_mode()
        raise KeyError
    assert constants.HF_HUB_OFFLINE == before


def test_a_dataset_of_an_unreachable_hub_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, closed_port: int
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    never_cached = DatasetSpec(
        name="x",
        hub_id="nobody-here/nothing",
        source_column="de",
        reference_column="en",
        metric="bleu",
    )
    began = time.perf_counter()
    with pytest.raises(
        UserError,
        match="wanted dataset 'nobody-here/nothing'.* from the Hugging Face hub.*dataset.path=DIR",
    ):
        load_examples(never_cached)
    assert time.perf_counter() - began < 5


@pytest.mark.slow
def test_hub_datasets_load_online_and_then_from_the_cache(tmp_path: Path, closed_port: int) -> None:
    repositories = {
        "IWSLT/iwslt2017@refs/convert/parquet": {
            "iwslt2017-de-en/test/0000.jsonl": ROWS,
            "iwslt2017-en-de/test/0000.jsonl": ROWS + ROWS,
        },
        "me/plain": {"test.jsonl": ROWS},
    }
    configured = {
        "hub_id": "IWSLT/iwslt2017",
        "hub_data_dir": "iwslt2017-de-en",
        "hub_revision": "refs/convert/parquet",
    }
    plain = {"hub_id": "me/plain"}
    no_split, missing = plain | {"split": "train"}, {"hub_id": "me/missing"}
    sentences = "['Ja', 'Nein']"
    with loopback_hub(repositories) as endpoint:
        online = load_in_a_fresh_process(endpoint, tmp_path, configured, plain, no_split, missing)
    assert online[:2] == [sentences, sentences]
    assert "cannot load dataset 'me/plain' (split=train)" in online[2] and "['test']" in online[2]
    assert (
        "cannot load dataset 'me/missing'" in online[3] and "doesn't exist on the Hub" in online[3]
    )

    offline = load_in_a_fresh_process(
        f"http://127.0.0.1:{closed_port}", tmp_path, configured, plain, no_split, missing
    )
    assert offline[:2] == [sentences, sentences]
    assert (
        "whose local cache could not be used (Unknown split" in offline[2]
        and "dataset.path=DIR" in offline[2]
    )
    assert "wanted dataset 'me/missing'" in offline[3] and "Connection refused" in offline[3]
