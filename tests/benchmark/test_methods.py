"""Other engines as methods: what they refuse, and that they run with the request's limits and our
threads.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

import bild_lab
from bild_lab.benchmark import peer_process as process
from bild_lab.benchmark.peer_methods import CTranslate2, OpenVINO
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.point.prepare import prepare
from tests.benchmark.fake import VERSIONS

PROMPT = "w5 w9"


def model(
    checkpoints: Path, device: str = "cpu", dtype: torch.dtype = torch.float32
) -> HuggingFaceModel:
    return HuggingFaceModel(Checkpoint(str(checkpoints / "llama")), torch.device(device), dtype)


def test_without_its_environment_a_peer_says_how_to_get_it(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FOLDER", tmp_path / ".venv-peers")
    reason = process.why_no_peers()  # as where the package is installed, without a Makefile
    assert reason is not None and reason.endswith(
        "run make peers in a clone of its repository, and this command there"
    )
    (tmp_path / "Makefile").touch()
    for policy in ("ctranslate2", "openvino", "openvino_speculative"):
        with pytest.raises(UserError, match=r"there is none in .*\.venv-peers; run make peers$"):
            bild_lab.load(str(checkpoints / "llama"), str(checkpoints / "llama-draft"), policy)


def test_versions_are_those_of_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "FOLDER", tmp_path)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").touch()
    told = tmp_path / "lib/python3.12/site-packages/openvino-9.1.dist-info/METADATA"
    told.parent.mkdir(parents=True)
    told.write_text("Metadata-Version: 2.1\nName: openvino\nVersion: 9.1\n")
    assert process.package_versions(["openvino"]) == {"openvino": "9.1"}
    with pytest.raises(UserError, match="lacks ctranslate2; remove it and run make peers"):
        process.package_versions(["openvino", "ctranslate2"])


@pytest.mark.usefixtures("fake_engines")
def test_what_a_peer_cannot_compute_is_refused(checkpoints: Path) -> None:
    with pytest.raises(
        UserError, match="openvino is run on a CPU, got meta; set runtime.device=cpu"
    ):
        OpenVINO(model(checkpoints, "meta"))
    with pytest.raises(UserError, match="ctranslate2 computes in float32 on a CPU, got bfloat16"):
        CTranslate2(model(checkpoints, dtype=torch.bfloat16))
    with pytest.raises(
        UserError, match="openvino computes in float32 and bfloat16 on a CPU, got float16"
    ):
        OpenVINO(model(checkpoints, dtype=torch.float16))
    with pytest.raises(
        UserError, match="decodes speculatively with decoder-only models, got .*use policy=openvino"
    ):
        bild_lab.load(
            str(checkpoints / "t5"), str(checkpoints / "t5-draft"), "openvino_speculative"
        )
    with pytest.raises(UserError, match="the draft window must be a whole number >= 1, got 0"):
        bild_lab.load(
            str(checkpoints / "llama"),
            str(checkpoints / "llama-draft"),
            "openvino_speculative",
            window=0,
        )


@pytest.mark.usefixtures("fake_engines")
def test_sampling_is_refused_in_words(checkpoints: Path) -> None:
    decoder = bild_lab.load(str(checkpoints / "llama"), policy="openvino")
    assert decoder.method.lossless(Sampling()) and not decoder.method.lossless(Sampling(1.0))
    with pytest.raises(
        UserError, match=r"openvino decodes greedily, got .*1.0; use decoding=greedy"
    ):
        decoder.generate(PROMPT, temperature=1.0)


@pytest.mark.usefixtures("fake_engines")
def test_quantized_weights_are_converted_for_themselves_and_never_lossless(
    checkpoints: Path, tmp_path: Path
) -> None:
    path = str(checkpoints / "llama")
    for policy, bits, dtype in (
        ("ctranslate2", 8, "bfloat16"),
        ("openvino", 8, "float32"),
        ("openvino", 4, "bfloat16"),
    ):
        decoder = bild_lab.load(path, policy=policy, bits=bits, dtype=dtype)
        assert decoder.method.precision == f"int{bits}" and not decoder.method.lossless(Sampling())
        assert decoder.method._job()["bits"] == bits
        assert list((tmp_path / "cache" / "peers").glob(f"{policy}{bits}-*/model"))
    with pytest.raises(UserError, match="policy.bits must be one of 8, null, got 4"):
        bild_lab.load(path, policy="ctranslate2", bits=4)
    with pytest.raises(UserError, match="policy.bits must be one of 8, 4, null, got 2"):
        bild_lab.load(path, policy="openvino", bits=2)


@pytest.mark.usefixtures("fake_engines")
def test_a_text_ends_at_the_requests_limits(checkpoints: Path) -> None:
    """The fake engine answers with the number of threads and the prompt."""
    method = OpenVINO(model(checkpoints))
    decoder = bild_lab.load(str(checkpoints / "llama"), policy="vanilla")
    request = decoder.request(PROMPT, 3)
    prompt = list(request.source.prompt)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)  # which happens to be the id of no end token
        assert method.decode(request, Trace()) == [*prompt, 2, *prompt[:2]]
        torch.set_num_threads(3)
        # another process, with as many threads
        assert method.decode(request, Trace()) == [*prompt, 3, *prompt[:2]]
    finally:
        torch.set_num_threads(before)
        method.close()


@pytest.mark.usefixtures("fake_engines")
@pytest.mark.parametrize(("slow", "kept"), [("1", "0"), ("0", None)])
def test_the_quickest_of_a_peers_settings_decodes(
    slow: str, kept: str | None, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLOW", slow)
    method = CTranslate2(model(checkpoints))
    request = bild_lab.load(str(checkpoints / "llama"), policy="vanilla").request(PROMPT, 2)
    before = {each.pid for each in psutil.Process().children()}
    text = method.decode(request, Trace())
    # the other one has ended
    (left,) = [each for each in psutil.Process().children() if each.pid not in before]
    assert left.environ().get("CT2_USE_MKL") == kept
    assert text[: len(request.source.prompt)] == list(request.source.prompt)
    method.close()


@pytest.mark.usefixtures("fake_engines")
def test_a_peer_is_woken_before_its_text_is_timed(checkpoints: Path) -> None:
    method = OpenVINO(model(checkpoints))
    request = bild_lab.load(str(checkpoints / "llama"), policy="vanilla").request(PROMPT, 2)
    method.decode(request, Trace())
    assert method._worker._stopped  # it takes nothing from others
    method.prepare(request)
    assert not method._worker._stopped
    method.close()


@pytest.mark.usefixtures("fake_engines")
def test_a_peer_starts_again_after_its_process_died(checkpoints: Path) -> None:
    method = OpenVINO(model(checkpoints))
    request = bild_lab.load(str(checkpoints / "llama"), policy="vanilla").request(PROMPT, 2)
    first = method.decode(request, Trace())
    method._worker._process.kill()
    with pytest.raises(
        RuntimeError, match="the process of openvino ended with status -9: it wrote nothing"
    ):
        method.decode(request, Trace())
    assert method.decode(request, Trace()) == first
    method.close()


@pytest.mark.slow
@pytest.mark.usefixtures("fake_engines")
def test_the_versions_of_a_peer_are_part_of_a_points_name(
    checkpoints: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        f"pair.target={checkpoints / 'llama'}",
        "dataset=multi30k",
        f"dataset.path={data}",
        "policy=openvino",
    ]
    old = prepare(compose_config(words))
    assert old.facts["versions"] == VERSIONS and old.decoders["method"].method.engine == "openvino"
    newer = VERSIONS | {"openvino": "2.0"}
    monkeypatch.setattr("bild_lab.benchmark.peer_methods.package_versions", lambda names: newer)
    new = prepare(compose_config(words))
    assert (new.id != old.id, new.setting == old.setting) == (True, True)
