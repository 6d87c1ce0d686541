"""LoRA adapters of the package peft, in a folder or on the hub: they load merged into their base model."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub import snapshot_download
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.peft_utils import find_adapter_config_file

from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.gguf_file import SUFFIX, GgufCheckpoint
from bild_lab.engine.models.hub import hub_problem
from bild_lab.errors import UserError

SETTINGS = "adapter_config.json"
FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja")  # of an adapter and its tokenizer


def recognized(checkpoint: Checkpoint) -> Checkpoint:
    """The checkpoint as what its files are: a GGUF file, an adapter (fetched if need be), or a model as it is."""
    if checkpoint.path.endswith(SUFFIX) and not checkpoint.in_folder:
        return GgufCheckpoint(checkpoint.path)
    folder = checkpoint.folder
    if checkpoint.on_hub:
        offline = {"revision": checkpoint.commit, "local_files_only": hub_problem() is not None}
        try:
            is_adapter = find_adapter_config_file(checkpoint.path, **offline) is not None
        except OSError:  # no name that the hub can have: reading the checkpoint says so
            is_adapter = False
        if not is_adapter:
            return checkpoint
        folder = Path(snapshot_download(checkpoint.path, allow_patterns=FILES, **offline))
    elif not (Path(checkpoint.location) / SETTINGS).is_file():
        return checkpoint
    revision = checkpoint.revision
    return AdapterCheckpoint(checkpoint.path, revision, checkpoint.trust_remote_code, folder, checkpoint.allow_pickles)


@dataclass(frozen=True)
class AdapterCheckpoint(Checkpoint):
    """An adapter of peft; `folder` has its files.

    Raises UserError without that package, and for an adapter that names no base.
    """

    weight_files: ClassVar[None] = None  # it has only what is added to the base's

    @cached_property
    def base(self) -> Checkpoint:
        """The model that the adapter was trained on."""
        if find_spec("peft") is None:
            raise UserError(
                f"{self.path} is an adapter, which the package peft reads; install it "
                "(pip install 'bild_lab[adapters]'), or give a folder with the merged weights"
            )
        settings = json.loads((Path(self.location) / SETTINGS).read_text())
        if not (name := settings.get("base_model_name_or_path")):
            raise UserError(f"{self.path} names no base_model_name_or_path in its {SETTINGS}; add the model's folder")
        return Checkpoint(name, settings.get("revision"), self.trust_remote_code, allow_pickles=self.allow_pickles)

    @cached_property
    def config(self) -> PreTrainedConfig:
        return self.base.config

    @cached_property
    def generation(self) -> GenerationConfig:
        return self.base.generation

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The adapter's own, if its folder has one."""
        if (Path(self.location) / "tokenizer_config.json").is_file():
            return AutoTokenizer.from_pretrained(self.location, trust_remote_code=self.trust_remote_code)
        return self.base.tokenizer

    def weights(self, dtype: torch.dtype, **placement: Any) -> PreTrainedModel:
        from peft import PeftModel

        model = self.base.weights(dtype, **placement)
        try:
            return PeftModel.from_pretrained(model, self.location).merge_and_unload()
        except (RuntimeError, ValueError, OSError, KeyError) as error:
            what = str(error).strip().splitlines()[0]
            raise UserError(
                f"the adapter {self.path} does not fit its base {self.base.path}: {what}; "
                "give the base it was trained on"
            ) from error

    @cached_property
    def fingerprint(self) -> str:
        """Of both: a hash of the adapter's files and of the base's fingerprint."""
        both = super().fingerprint + self.base.fingerprint
        return hashlib.sha256(both.encode()).hexdigest()[:16]
