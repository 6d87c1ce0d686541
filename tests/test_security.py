"""What comes from outside is data: no code of checkpoints, no pickles, no evaluated strings, no
markup, no secrets.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import bild_lab
import run
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.errors import UserError
from bild_lab.lab.config.command_line import require_no_secrets
from bild_lab.lab.data.dataset_spec import DatasetSpec
from bild_lab.lab.data.examples import load_examples
from bild_lab.lab.point.build import build
from tests.loopback_hub import contents, pickled

TOKEN = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz"
SCRIPT = "<script>alert('w3')</script>"

Command = Callable[..., tuple[int, str]]


@pytest.fixture
def command(command: Command) -> Command:
    """Runs run.py in an empty folder; returns its exit code and everything it printed."""
    return partial(command, run)


def changed(checkpoint: Path, folder: Path, **settings: object) -> Path:
    """A copy of a checkpoint with other settings in its configuration."""
    shutil.copytree(checkpoint, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


def test_a_checkpoints_own_code_runs_only_where_it_was_asked_for(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    own = {"model_type": "own_code", "auto_map": {"AutoConfig": "own_code.OwnConfig"}}
    folder = changed(checkpoints / "t5", tmp_path / "own", **own)
    ran = tmp_path / "ran"
    code = (
        f"from pathlib import Path\nfrom transformers import T5Config\nPath({str(ran)!r}).touch()\n"
    )
    (folder / "own_code.py").write_text(
        f"{code}class OwnConfig(T5Config):\n    model_type = 'own_code'\n"
    )
    with pytest.raises(
        UserError, match=r"Python code of its own.*set runtime\.trust_remote_code=true"
    ):
        Checkpoint(str(folder)).check()
    assert not ran.exists()
    assert Checkpoint(str(folder), trust_remote_code=True).config.model_type == "own_code"
    assert ran.exists()


OWN_MODEL = """
from transformers import LlamaConfig, LlamaForCausalLM


class OwnConfig(LlamaConfig):
    model_type = "own_model"


class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_of_code_that_is_trusted_decodes_as_transformers_does(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    monkeypatch.syspath_prepend(tmp_path / "modules")
    classes = {"AutoConfig": "own_model.OwnConfig", "AutoModelForCausalLM": "own_model.OwnModel"}
    own = {"model_type": "own_model", "auto_map": classes}
    folder = changed(checkpoints / "llama", tmp_path / "own", **own)
    (folder / "own_model.py").write_text(OWN_MODEL)
    expected = bild_lab.load(checkpoints / "llama", policy="vanilla").generate([5, 9, 12], 8)
    decoder = bild_lab.load(folder, policy="vanilla", trust_remote_code=True)
    assert decoder.generate([5, 9, 12], 8).token_ids == expected.token_ids
    assert decoder.target.engine == "hf"
    # in memory, where nobody asks for trust any more
    in_memory = (decoder.target.module, decoder.target.checkpoint.tokenizer)
    texts = bild_lab.load(in_memory, policy="vanilla").generate([5, 9, 12], 8)
    assert texts.token_ids == expected.token_ids


def test_pickled_weights_are_refused_before_anything_is_read(
    checkpoints: Path, tmp_path: Path
) -> None:
    folder = changed(checkpoints / "t5", tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(
        UserError, match=r"pytorch_model\.bin and no safetensors.*runtime\.allow_pickles=true"
    ):
        Checkpoint(str(folder)).check()


class Harm:
    """Writes a file as it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("harmed"),)


def test_pickles_that_are_allowed_give_the_same_weights_and_run_nothing(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = changed(checkpoints / "t5", tmp_path / "pickled")
    for name, content in pickled(contents(folder)).items():
        (folder / name).write_bytes(content)
    (folder / "model.safetensors").unlink()
    wanted = bild_lab.load(str(checkpoints / "t5"), policy="vanilla").generate(
        "w5 w9", max_new_tokens=5
    )
    got = bild_lab.load(str(folder), policy="vanilla", allow_pickles=True).generate(
        "w5 w9", max_new_tokens=5
    )
    assert got.token_ids == wanted.token_ids
    torch.save({"shared.weight": Harm()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot read the weights"):
        Checkpoint(str(folder), allow_pickles=True).weights(torch.float32)
    assert not Path("harmed").exists()


def test_pickles_beside_safetensors_are_not_looked_at(checkpoints: Path, tmp_path: Path) -> None:
    folder = changed(checkpoints / "t5", tmp_path / "both")
    (folder / "pytorch_model.bin").write_bytes(b"not a pickle")
    Checkpoint(str(folder)).check()
    assert (
        bild_lab.load(str(folder), policy="vanilla").generate("w5 w9", max_new_tokens=3).token_ids
    )


@pytest.mark.parametrize(
    "target", ["os.system", "builtins.eval", "subprocess.Popen", "shutil.rmtree"]
)
def test_a_configuration_cannot_call_pythons_own_functions(target: str) -> None:
    with pytest.raises(UserError, match="belongs to Python itself"):
        build({"_target_": target, "command": "touch ran"}, {})


def test_texts_of_a_data_set_are_never_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOWN", "evaluated")
    texts = [
        "${oc.env:SHOWN}",
        "{source.__class__}",
        "{{ 7 * 7 }}",
        "{0}",
        "__import__('os').getcwd()",
        "%(source)s",
    ]
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    template = "say ${oc.env:SHOWN} {source} {{x}}"
    spec = DatasetSpec(
        name="x", path=str(file), source_column="text", metric="agreement", prompt_template=template
    )
    examples = load_examples(spec)
    assert [example.source for example in examples] == texts
    assert [example.prompt for example in examples] == [
        template.replace("{source}", text) for text in texts
    ]


@pytest.mark.usefixtures("no_picture")
def test_a_script_in_a_prompt_stays_text_in_the_report(
    command: Command, checkpoints: Path, tmp_path: Path
) -> None:
    row = {"id": SCRIPT, "de": f"w5 {SCRIPT} w7", "en": SCRIPT, "kind": SCRIPT}
    (tmp_path / "test.jsonl").write_text(json.dumps(row) + "\n")
    words = [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "dataset=multi30k",
    ]
    words += [f"dataset.path={tmp_path}", "dataset.id_column=id", "dataset.category_column=kind"]
    words += [
        "decoding.max_new_tokens=4",
        "measure.repeats=1",
        "measure.warmup=0",
        "name='a<b'",
        "policy.window=3",
    ]
    code, printed = command(*words)
    assert code == 0, printed
    report = Path("outputs/a<b/report.html").read_text()
    assert SCRIPT not in report
    assert "<script>alert" not in report
    assert "alert(" in report  # it is there, as text


@pytest.mark.parametrize(
    "word",
    [
        f"logger.entity={TOKEN}",
        f"dataset.path=https://user:{TOKEN}@host/data",
        "+logger.api_key=0123456789",
        "hydra.job.env_set.WANDB_API_KEY=0123456789",
        "logger.entity=${oc.env:WANDB_API_KEY}",
        "name=${oc.env:HF_TOKEN,none}",
        "policy.table=the-secret-of-the-environment",
    ],
)
def test_a_secret_on_the_command_line_is_refused_and_saved_nowhere(
    word: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "the-secret-of-the-environment")
    code, printed = command(word)
    assert code == 2
    assert "would save a secret with the results" in printed
    assert TOKEN not in printed and "the-secret-of-the-environment" not in printed
    assert [file for file in Path().rglob("*") if file.is_file()] == []


def test_words_that_only_look_like_secrets_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "short")
    words = [
        "dataset.source_column=tokens",
        "decoding.max_new_tokens=64",
        "pair.target_revision=" + "0a" * 20,
    ]
    require_no_secrets(
        [
            *words,
            "name=short",
            "-m",
            "policy.table=${oc.env:HOME}/table",
            "pair.target=hf_models/t5",
        ]
    )


def test_secrets_of_the_environment_are_in_no_file_of_a_sweep(
    command: Command, checkpoints: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "the-secret-of-the-environment")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    words = [
        f"pair.target={checkpoints / 't5'}",
        f"pair.draft={checkpoints / 't5-draft'}",
        "dataset=multi30k",
    ]
    words += [
        f"dataset.path={data}",
        "dataset.limit=1",
        "decoding.max_new_tokens=4",
        "measure.repeats=1",
    ]
    code, printed = command("-m", *words, "measure.warmup=0", "name=tested", "policy.window=3")
    assert code == 0, printed
    files = [file for file in Path("outputs").rglob("*") if file.is_file()]
    assert {"config.yaml", "multirun.yaml"} <= {file.name for file in files}
    for secret in (TOKEN, "the-secret-of-the-environment"):
        assert [file for file in files if secret.encode() in file.read_bytes()] == []
