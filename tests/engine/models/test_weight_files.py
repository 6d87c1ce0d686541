"""Of all files in a checkpoint those are read, and identify it, that `from_pretrained` of
Transformers reads.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.checkpoint.weight_files import in_folder
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.errors import UserError
from tests.loopback_hub import contents, loopback_hub, printed_in_a_fresh_process
from tests.tiny import save, tiny_llama

NORM = "model.norm.weight"  # its value says from which file the weights came
ONE, INDEX = "model.safetensors", "model.safetensors.index.json"
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
Weights = Mapping[str, Tensor]


def write(weights: Weights, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        save_file(dict(weights), path, metadata={"format": "pt"})
    else:
        torch.save(dict(weights), path)


def write_shards(weights: Weights, index: Path, shard: str) -> None:
    """shard: the name of a shard, with {} for its number."""
    place = {name: shard.format(number % 2) for number, name in enumerate(weights)}
    for file in set(place.values()):
        write({name: weights[name] for name in weights if place[name] == file}, index.parent / file)
    index.write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": place}))


def write_stale_index(weights: Weights, folder: Path) -> None:
    write_shards(weights, folder / INDEX, "gone-{}.safetensors")
    for shard in folder.glob("gone-*"):
        shard.unlink()


def write_unrelated(weights: Weights, folder: Path) -> None:
    for name in (
        "consolidated.safetensors",
        "adapter_model.safetensors",
        "model.fp16.safetensors",
        "optimizer.pt",
    ):
        write(weights, folder / name)
    write({"step": torch.ones(1)}, folder / "training_args.bin")


def write_named(weights: Weights, folder: Path) -> None:
    write(weights, folder / "named.safetensors")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(settings | {"transformers_weights": "named.safetensors"})
    )


PIECES: dict[str, Callable[[Weights, Path], None]] = {
    "one file": lambda weights, folder: write(weights, folder / ONE),
    "shards": lambda weights, folder: write_shards(weights, folder / INDEX, "model-{}.safetensors"),
    "stale index": write_stale_index,
    "pickle": lambda weights, folder: write(weights, folder / BIN),
    "pickled shards": lambda weights, folder: write_shards(
        weights, folder / BIN_INDEX, "pytorch_model-{}.bin"
    ),
    "unrelated": write_unrelated,
    "named": write_named,
}
MIXTURES = [
    *(chosen for count in range(3) for chosen in itertools.combinations(PIECES, count)),
    ("one file", "stale index", "pickle", "pickled shards", "unrelated"),
    ("shards", "pickle", "pickled shards", "unrelated"),
]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_llama(0, layers=1), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def folder(small: Path, tmp_path: Path) -> Path:
    """A checkpoint without weights."""
    for file in small.iterdir():
        if file.name != ONE:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def weights_with(value: float) -> Weights:
    state = tiny_llama(0, layers=1).state_dict()
    return state | {NORM: torch.full_like(state[NORM], value)}


def read_by_transformers(folder: Path) -> float | None:
    try:
        return AutoModelForCausalLM.from_pretrained(folder).state_dict()[NORM][0].item()
    except OSError:
        return None


def read_by_us(folder: Path, allow_pickles: bool) -> float | None:
    """None for a folder that is refused before weights load."""
    checkpoint = Checkpoint(str(folder), allow_pickles=allow_pickles)
    try:
        checkpoint.check()
    except UserError:
        return None
    ours = NativeModel(
        HuggingFaceModel(checkpoint, torch.device("cpu"), torch.float32)
    ).decoder.final_norm
    theirs = checkpoint.weights(torch.float32).state_dict()[NORM]
    assert torch.equal(ours, theirs)
    return theirs[0].item()


@pytest.mark.fast(
    "",
    "pickled shards",
    "named",
    "one file + stale index",
    "shards + stale index",
    "shards + pickled shards",
    "shards + named",
    "pickle + pickled shards",
    "pickle + named",
    "pickled shards + named",
)
@pytest.mark.parametrize("mixture", MIXTURES, ids=" + ".join)
def test_of_every_mixture_of_files_those_are_read_that_transformers_reads(
    mixture: tuple[str, ...], folder: Path
) -> None:
    # of shards and a stale index, which have one name, the latter is left
    for number, name in enumerate(PIECES, 1):
        if name in mixture:
            PIECES[name](weights_with(number), folder)
    expected = read_by_transformers(folder)
    assert read_by_us(folder, allow_pickles=True) == expected
    pickled = expected is not None and [*PIECES][int(expected) - 1] in ("pickle", "pickled shards")
    assert read_by_us(folder, allow_pickles=False) == (None if pickled else expected)


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        Checkpoint(str(folder)).check()
    return str(refused.value)


def test_what_is_wrong_with_weight_files_is_said_before_weights_load(folder: Path) -> None:
    assert (
        "wanted model.safetensors or model.safetensors.index.json, got no file with weights"
        in refusal(folder)
    )
    write(weights_with(1), folder / "model.fp16.safetensors")
    assert "got model.fp16.safetensors; rename the file" in refusal(folder)
    write(weights_with(1), folder / BIN)
    assert "has pytorch_model.bin and no safetensors weights" in refusal(folder)
    write_stale_index(weights_with(1), folder)
    assert f"lacks gone-0.safetensors, which its {INDEX} lists" in refusal(folder)
    (folder / INDEX).write_text("{}")
    assert f"cannot read {folder / INDEX}: it must list the shard of each weight" in refusal(folder)
    write(weights_with(1), folder / ONE)
    Checkpoint(str(folder)).check()
    write(weights_with(2), folder / "shard-00001-model-00001-of-00001.safetensors")
    assert "a shard of a distributed training, which Transformers reads in place of" in refusal(
        folder
    )


def test_an_adapter_beside_weights_is_refused_as_transformers_may_leave_it_out(
    folder: Path,
) -> None:
    write(weights_with(1), folder / ONE)
    (folder / "adapter_config.json").write_text("{}")
    assert "has an adapter beside its weights; merge it" in refusal(folder)


def test_a_checkpoint_is_known_by_the_files_that_are_read(folder: Path) -> None:
    def fingerprint() -> str:
        return Checkpoint(str(folder)).fingerprint

    write_shards(weights_with(1), folder / INDEX, "parts/{}.safetensors")
    before = fingerprint()
    write_shards(weights_with(2), folder / INDEX, "parts/{}.safetensors")
    shards = fingerprint()
    assert before != shards
    write_unrelated(weights_with(3), folder)
    write(weights_with(3), folder / BIN)
    assert fingerprint() == shards
    write(weights_with(2), folder / ONE)
    one_file = fingerprint()
    assert one_file != shards
    write_shards(weights_with(4), folder / INDEX, "parts/{}.safetensors")
    assert fingerprint() == one_file
    (folder / "own.py").write_text("")
    with_code = fingerprint()
    write(weights_with(5), folder / BIN)
    assert fingerprint() != with_code


def test_files_that_no_index_names_are_not_read(tmp_path: Path) -> None:
    for name in ("part-1.safetensors", "part-2.safetensors", "old.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(
        json.dumps({"weight_map": {"a": "part-1.safetensors", "b": "part-2.safetensors"}})
    )
    assert in_folder(tmp_path) == [INDEX, "part-1.safetensors", "part-2.safetensors"]


_READ_BOTH = f"""
import sys, torch
from transformers import AutoModelForCausalLM
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.errors import UserError
for name in sys.argv[1:]:
    try:
        checkpoint = Checkpoint(name)
        checkpoint.check()
        model = NativeModel(HuggingFaceModel(checkpoint, torch.device("cpu"), torch.float32))
        theirs = AutoModelForCausalLM.from_pretrained(name).state_dict()[{NORM!r}]
        print(model.decoder.final_norm[0].item(), theirs[0].item())
    except UserError as error:
        print(" ".join(str(error).split()))
"""


@pytest.mark.slow
def test_of_a_hubs_files_those_are_read_that_transformers_reads(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    models, home = {}, tmp_path_factory.mktemp("home")
    write_shards(weights_with(2), folder / INDEX, "model-{}.safetensors")
    models["me/shards"] = contents(folder)
    write(weights_with(3), folder / BIN)
    models["me/beside-pickle"] = contents(folder)
    write(weights_with(1), folder / ONE)
    models["me/both"] = contents(folder)
    models["me/adapter"] = models["me/both"] | {"adapter_config.json": b"{}"}
    models["me/none"] = {
        name: file for name, file in models["me/both"].items() if "model" not in name
    }
    with loopback_hub({}, models) as endpoint:
        shards, beside, both, adapter, none = printed_in_a_fresh_process(
            _READ_BOTH, endpoint, home, *models
        )
    assert shards == beside == "2.0 2.0" and both == "1.0 1.0"
    assert adapter.startswith("me/adapter has an adapter beside its weights")
    assert none.startswith(
        "me/none has no weights that Transformers reads: wanted model.safetensors"
    )
