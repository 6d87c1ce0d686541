"""The policies of conf/policy: which are lossless, and what each can decode with."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

from hydra.utils import get_object
from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

import bild_lab
from bild_lab.engine.models.checkpoint.checkpoint import Checkpoint
from bild_lab.engine.models.hf.model import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.engine.sampling import Sampling
from bild_lab.engine.session import LoadedModel
from bild_lab.lab.config.compose import config_dir, policy_names
from bild_lab.lab.config.policies import flat_values
from tests.checkpoints import tiny_checkpoints
from tests.engine.methods.drafters.tables import ngram_table
from tests.engine.methods.modules.tiny import files_of
from tests.tiny import tiny_tokenizer

FAMILIES = ("t5", "llama")
WINDOWED = ("qwen3", "gemma3")  # families of which some layers see a window only
# tests/engine/methods: of decoder-only models, and of those that do not scale their embeddings
REFUSED = {("bita", "t5"), ("medusa", "t5"), ("mtp", "t5"), ("mtp", "gemma3")}
# need `make peers` (tests/benchmark)
EXTERNAL = ("ctranslate2", "llama_cpp", "openvino", "openvino_speculative")
SERVER = "server"  # needs a server (tests/servers)
REPLAYED = "answers"  # needs a file with an answer to every prompt (tests/engine/methods/test_replayed_answers.py)
# they refuse to sample
GREEDY_ONLY = {"bild_released", "synthetic", REPLAYED, *EXTERNAL}
BAR = {"ratio": 0.1}  # of `truncation`, whose file has none
RUNNABLE = [
    (policy, family)
    for policy in policy_names()
    for family in FAMILIES
    if policy not in (*EXTERNAL, REPLAYED, SERVER) and (policy, family) not in REFUSED
]


@lru_cache
def shipped(policy: str) -> DictConfig:
    """The policy of its file, with a bar for `truncation`, which needs one; read once for all tests,
    not to be changed.
    """
    node = OmegaConf.create(
        {"policy": OmegaConf.load(config_dir() / "policy" / f"{policy}.yaml")}
    ).policy
    if policy == "truncation":
        node.update(BAR)
    return node


@lru_cache
def parts(policy: str) -> dict[str, object]:
    """The values of a policy's decoder, with dotted keys."""
    return flat_values(OmegaConf.to_container(shipped(policy).decoder, resolve=True))


@lru_cache
def is_lossless(policy: str, temperature: float = 0.0) -> bool:
    """What the policy's method says of itself, built with the values of its file."""
    if policy in (
        *EXTERNAL,
        REPLAYED,
        SERVER,
    ):  # which says the same without its environment or file
        method = get_object(str(parts(policy)["_target_"]))
        return method.lossless(SimpleNamespace(bits=None), Sampling(temperature))
    return load(tiny_checkpoints(), "llama", policy).method.lossless(Sampling(temperature))


def is_peer(policy: str) -> bool:
    """It runs the modules of Transformers, whatever engine is chosen, or an engine of its own."""
    return str(parts(policy)["_target_"]).startswith(
        ("bild_lab.engine.methods.hf_generation.", "bild_lab.benchmark.")
    )


def engines(policy: str) -> tuple[str, ...]:
    """On which engines it is another computation."""
    if is_peer(policy):
        return ("hf",)
    return ("native", "hf")


def load(
    checkpoints: Path, family: str, policy: str, processors: object = "none", **knobs: object
) -> bild_lab.Decoder:
    """A policy on the tiny checkpoints of a family, with the files it needs."""
    if policy in policy_names() and "table" in shipped(policy):
        knobs = {"table": str(ngram_table(checkpoints / family)), **knobs}
    if policy == "truncation":
        knobs = {**BAR, **knobs}
    made_for = "llama" if (policy, family) in REFUSED else family
    knobs = {
        **files_of(policy, Checkpoint(str(checkpoints / made_for)).config, checkpoints),
        **knobs,
    }
    draft = str(checkpoints / f"{family}-draft")
    # which composes once for all tests
    whole = policy if knobs or policy not in policy_names() else shipped(policy)
    return bild_lab.load(
        str(checkpoints / family), draft, whole, second_draft=draft, processors=processors, **knobs
    )


def in_memory(module: PreTrainedModel, engine: str = "hf") -> LoadedModel:
    """A module as a loaded model, without files: a tied head, as T5's must be in a file, repeats
    one token.

    engine: hf, native, or kernels, which is native by the CPU kernels.
    """
    checkpoint = Checkpoint("in memory")
    encoder_decoder = module.config.is_encoder_decoder
    vars(checkpoint).update(
        config=module.config,
        tokenizer=tiny_tokenizer(encoder_decoder),
        generation=module.generation_config,
    )
    model = HuggingFaceModel(checkpoint, module.device, module.dtype)
    model.module = module
    if engine == "hf":
        return model
    native = NativeModel(model, kernels=engine == "kernels")
    native.decoder = (T5Decoder if encoder_decoder else LlamaDecoder)(copy.deepcopy(module))
    return native
