"""The folder of a small trained module: one safetensors file, and a configuration with its
shapes.
"""

from __future__ import annotations

import dataclasses
import json
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes
from torch import Tensor, nn
from transformers import PreTrainedConfig

from bild_lab.engine.draft_vocabulary import DraftVocabulary
from bild_lab.engine.models.checkpoint.hub import hub_problem, require_hub
from bild_lab.engine.models.native.llama import head_width
from bild_lab.errors import UserError, first_line
from bild_lab.files import pin_of, write_atomically, write_json

if TYPE_CHECKING:
    from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
    from bild_lab.engine.session import LoadedModel

Config = TypeVar("Config")


@dataclass(frozen=True)
class FolderKind:
    """A kind of folder: its two files, its name in messages, and the command that makes one."""

    weights: str
    config: str
    noun: str
    remedy: str


def base_sizes(config: PreTrainedConfig, noun: str) -> dict[str, int]:
    """The sizes of a decoder-only model that a small module depends on: layers, KV cache and
    vocabulary. Raises UserError for an encoder–decoder.
    """
    if config.is_encoder_decoder:
        raise UserError(
            f"{noun} needs a decoder-only model, got the encoder–decoder {config.model_type}"
        )
    text = config.get_text_config(decoder=True)
    return {
        "layers": text.num_hidden_layers,
        "kv_heads": getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
        "head_dim": head_width(text),
        "hidden_size": text.hidden_size,
        "vocabulary": text.vocab_size,
    }


def require_made_for(
    checkpoint: Checkpoint, config: Any, sizes: Mapping[str, int], noun: str
) -> None:
    """Raise UserError unless a small module's configuration has the target's sizes and the
    fingerprint of its weights.

    A configuration without a fingerprint is taken for the target's.
    """
    trained_for = config.base.get("path", "another model")
    remedy = "choose that model, or train anew for this target"
    for name, target_size in sizes.items():
        if (stored := getattr(config, name)) != target_size:
            raise UserError(
                f"cannot use {noun}: trained for {trained_for}, whose {name} is {stored}, but the"
                f" target's is {target_size}; {remedy}"
            )
    if "fingerprint" in config.base and config.base["fingerprint"] != checkpoint.fingerprint:
        raise UserError(
            f"cannot use {noun}: trained for {trained_for}, whose weights are not those of"
            f" {checkpoint.path}; {remedy}"
        )


class SavedModule(nn.Module):
    """A small trained module that has a folder of its own. config: its shapes, and the model it was
    trained for.

    draft_vocabulary: the only tokens that it drafts; None: all.
    """

    kind: ClassVar[FolderKind]
    config_class: ClassVar[type]
    draft_vocabulary: DraftVocabulary | None = None

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config

    def save(self, folder: Path | str) -> None:
        write_module(Path(folder), self.kind, self.state_dict(), dataclasses.asdict(self.config))

    @classmethod
    def load(cls, folder: Path | str) -> Self:
        """Read a module that `save` wrote, on the CPU. Raises UserError for any other folder."""
        folder = Path(folder).expanduser()
        module = cls(read_config(folder, cls.kind, cls.config_class))
        fill_module(
            module,
            read_tensors(folder, cls.kind, [cls.kind.weights]),
            folder / cls.kind.weights,
            cls.kind,
        )
        return module

    @classmethod
    def load_for(
        cls,
        target: LoadedModel,
        path: str | None,
        draft_vocabulary: DraftVocabulary | None = None,
        **sizes: int,
    ) -> Self:
        """Read a module that drafts for this target, on its device, in its precision. It is not
        trained any further.

        sizes: of the target, which the module's configuration must have. Raises UserError without a
        path, for another folder, and for a module of another model.
        """
        if path is None:
            raise UserError(f"this policy needs a {cls.kind.noun}; {cls.kind.remedy}")
        module = cls.load(path)
        require_made_for(target.checkpoint, module.config, sizes, f"the {cls.kind.noun} {path}")
        module.draft_vocabulary = draft_vocabulary
        return module.to(target.device, target.dtype).requires_grad_(False)


def read_config(folder: Path, kind: FolderKind, cls: type[Config]) -> Config:
    """Read the configuration. Raises UserError for a folder that holds something else."""
    names = {field.name for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    with described_in(folder, kind) as path:
        values = json.loads(path.read_text(encoding="utf-8"))
        if set(values) != names:
            raise UserError(
                f"{path} must hold {', '.join(sorted(names))} and nothing else; {kind.remedy}"
            )
        return cls(**values)


@contextmanager
def described_in(folder: Path, kind: FolderKind) -> Iterator[Path]:
    """The file of a configuration, for a block that reads it. What the block misses there, or finds
    to be of another form, becomes a UserError.
    """
    path = folder / kind.config
    try:
        yield path
    except UserError:  # says itself what is wrong
        raise
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(
            f"{folder} is no {kind.noun}: it needs {kind.config} and {kind.weights}; {kind.remedy}"
        ) from error
    except (
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        ArithmeticError,
        StrictDataclassError,
    ) as error:
        raise UserError(f"{path} describes no {kind.noun} ({error}); {kind.remedy}") from error


def fill_module(
    module: nn.Module, tensors: Mapping[str, Tensor], place: Path, kind: FolderKind
) -> None:
    """Load these weights of a place into the module.

    Raises UserError, with those that differ, if they do not fit.
    """
    expected = shapes(module.state_dict())
    actual = shapes(tensors)
    if expected != actual:
        missing = {name: shape for name, shape in expected.items() if actual.get(name) != shape}
        surplus = {name: shape for name, shape in actual.items() if expected.get(name) != shape}
        raise UserError(
            f"{place} must hold {describe_shapes(missing)}, got {describe_shapes(surplus)};"
            f" {kind.remedy}"
        )
    module.float()  # a process may have another default, to which the numbers would be rounded
    module.load_state_dict(tensors)


def write_module(
    folder: Path, kind: FolderKind, weights: Mapping[str, Tensor], config: Mapping[str, Any]
) -> None:
    """Write the weights, then the configuration, each file atomically."""
    tensors = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
    write_atomically(folder / kind.weights, to_bytes(tensors, metadata={"format": "pt"}))
    write_json(folder / kind.config, config)


def released_folder(path: str, kind: FolderKind, files: Sequence[str]) -> Path:
    """The folder itself, or where the hub's files are, at their commit if `pins.yaml` has one. files:
    patterns of what is fetched.

    Raises UserError if none.
    """
    folder = Path(path).expanduser()
    if (
        folder.is_dir()
        or folder.is_absolute()
        or path.startswith((".", "~"))
        or path.count("/") != 1
    ):
        return folder
    offline = hub_problem() is not None  # files downloaded before can still be used
    pin = pin_of("models", path, None)
    try:
        return Path(
            snapshot_download(
                path,
                revision=None if pin is None else pin["revision"],
                allow_patterns=[kind.config, *files],
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError:
        require_hub(f"the {kind.noun} {path}", "give a local folder instead: policy.heads=DIR")
        raise
    except (HTTPError, HFValidationError, OSError) as error:
        raise UserError(
            f"no {kind.noun} {path} here or on the hub: {error}; {kind.remedy}"
        ) from error


def read_tensors(folder: Path, kind: FolderKind, names: Sequence[str]) -> dict[str, Tensor]:
    """The weights in the first of these files that there is. Nothing but tensors is read from a
    pickle.

    Raises UserError if there is none, and for a file that holds something else.
    """
    file = next((folder / name for name in names if (folder / name).is_file()), None)
    if file is None:
        raise UserError(
            f"{folder} is no {kind.noun}: it needs {kind.config} and {names[0]}; {kind.remedy}"
        )
    try:
        if file.suffix == ".safetensors":
            return load_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (OSError, SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise UserError(f"cannot read {file}: {first_line(error)}; {kind.remedy}") from error
    if isinstance(content, Mapping) and all(
        isinstance(value, Tensor) for value in content.values()
    ):
        return dict(content)
    raise UserError(f"{file} must hold tensors by name, got something else; {kind.remedy}")


def shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def describe_shapes(shapes_by_name: Mapping[str, tuple[int, ...]]) -> str:
    return (
        ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes_by_name.items()))
        or "nothing"
    )
