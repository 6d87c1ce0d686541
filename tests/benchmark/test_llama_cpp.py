"""llama.cpp as a method: what it refuses, what it says of its file, and its texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from bild_lab.engine.sampling import Sampling
from bild_lab.engine.trace import Trace
from bild_lab.errors import UserError
from bild_lab.lab.config.compose import compose_config
from bild_lab.lab.measure.runner import run_point
from bild_lab.lab.point.load import load
from bild_lab.lab.point.prepare import prepare
from bild_lab.lab.store.records import Sweep
from tests.benchmark.fake import needs_peers
from tests.engine.models.gguf_files import MODELS, PROMPT, tiny, write

Q4_K_M, Q8_0 = 15, 7  # general.file_type, whatever the tensors are


def written(path: Path, file_type: int = Q4_K_M, model: str = "qwen2") -> str:
    return str(write(tiny(model), path, **{"general.file_type": file_type}))


@pytest.fixture
def file(tmp_path: Path) -> str:
    return written(tmp_path / "tiny.gguf")


@pytest.mark.usefixtures("fake_engines")
def test_what_llama_cpp_cannot_run_is_refused_before_weights_load(
    checkpoints: Path, tmp_path: Path, file: str
) -> None:
    llama = str(checkpoints / "llama")
    with pytest.raises(
        UserError, match=r"reads a GGUF file, got .*llama; set policy\.file=FILE\.gguf"
    ):
        load(llama, policy="llama_cpp")
    with pytest.raises(UserError, match=r"no GGUF file .*missing\.gguf"):
        load(llama, policy="llama_cpp", file=str(tmp_path / "missing.gguf"))
    with pytest.raises(UserError, match="runs decoder-only models here, got .*t5"):
        load(str(checkpoints / "t5"), policy="llama_cpp", file=file)
    with pytest.raises(
        UserError,
        match=r"another vocabulary than .*llama, as token 3 is '<unk>' in the file and 'w3' in",
    ):
        load(llama, policy="llama_cpp", file=file)
    with pytest.raises(UserError, match="llama_cpp decodes greedily, got decoding.temperature=1.0"):
        load(file, policy="llama_cpp").generate(PROMPT, 3, temperature=1.0)


@pytest.mark.usefixtures("fake_engines")
def test_it_is_no_lossless_method_at_the_precision_of_its_file(tmp_path: Path, file: str) -> None:
    small = written(tmp_path / "small.gguf", Q8_0)
    alone, beside = (
        load(file, policy="llama_cpp").method,
        load(file, policy="llama_cpp", file=small).method,
    )
    assert (alone.precision, beside.precision) == ("q4_k_m", "q8_0")
    assert not alone.lossless(Sampling())
    assert (
        load(
            str(write(tiny("qwen2"), tmp_path / "silent.gguf")), policy="llama_cpp"
        ).method.precision
        == "unknown"
    )


@pytest.mark.usefixtures("fake_engines")
def test_a_longer_text_gets_a_process_with_room_for_it(file: str) -> None:
    decoder = load(file, policy="llama_cpp")
    method = decoder.method
    assert method.decode(decoder.request([5, 9], 3), Trace())[:2] == [5, 9]
    assert len(method.emission_s) == 3 and sorted(method.emission_s) == method.emission_s
    first, method._positions = method._worker, 8
    assert (
        method.decode(decoder.request([5, 9], 6), Trace())[:2] == [5, 9] and method._worker is first
    )
    assert (
        method.decode(decoder.request([5, 9], 7), Trace())[:2] == [5, 9]
        and method._worker is not first
    )
    assert (method._positions, first.alive) == (16, False)
    method.close()


@pytest.mark.slow
@pytest.mark.usefixtures("fake_engines")
def test_a_points_result_has_the_precision_of_the_file_whose_content_is_part_of_its_name(
    data: Path, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = written(tmp_path / "other.gguf", Q8_0)
    words = [f"pair.target={file}", "dataset=multi30k", f"dataset.path={data}", "policy=llama_cpp"]
    words += [
        f"policy.file={other}",
        "dataset.limit=2",
        "decoding.max_new_tokens=4",
        "measure.warmup=0",
    ]
    point = prepare(compose_config(words))
    result = run_point(point, Sweep(tmp_path / "sweep"))
    assert (result.engine, result.precision, result.own_weights) == ("llama_cpp", "q8_0", "q8_0")
    written(Path(other), Q4_K_M)
    again = prepare(compose_config(words))
    assert again.id != point.id and again.setting == point.setting
    assert again.decoders["method"].method.precision == "q4_k_m"


@pytest.mark.slow
@needs_peers
@pytest.mark.parametrize("model", MODELS)
def test_the_real_library_gives_the_tokens_of_vanilla_from_a_file_in_float32(
    model: str, tmp_path: Path
) -> None:
    file = written(tmp_path / "tiny.gguf", 0, model)
    vanilla, peer = (load(file, file, one, dtype="float32") for one in ("vanilla", "llama_cpp"))
    assert peer.method.precision.startswith("f32")
    for prompt in (PROMPT, [7], PROMPT[::-1] * 3):
        for limit in (1, 2, 7, 25):
            assert (
                peer.generate(prompt, limit).token_ids == vanilla.generate(prompt, limit).token_ids
            )
    peer.method.close()


@pytest.mark.slow
@needs_peers
def test_a_file_that_the_real_library_cannot_run_is_refused_with_its_reason(file: str) -> None:
    decoder = load(file, policy="llama_cpp")
    Path(file).write_bytes(Path(file).read_bytes()[:-10_000])
    with pytest.raises(UserError, match=r"llama_cpp cannot load .*tiny\.gguf: .*"):
        decoder.method.prepare(decoder.request(PROMPT, 3))
