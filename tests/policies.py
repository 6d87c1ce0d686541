"""The policies of conf/policy: which are lossless, and what each can decode with."""

from __future__ import annotations

import copy
from functools import lru_cache
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from transformers import PreTrainedModel

import bild_lab
from bild_lab.engine.models.checkpoint import Checkpoint
from bild_lab.engine.models.hf import HuggingFaceModel
from bild_lab.engine.models.native import NativeModel
from bild_lab.engine.models.native.llama import LlamaDecoder
from bild_lab.engine.models.native.t5 import T5Decoder
from bild_lab.lab.build import flatten
from bild_lab.lab.config import compose_policy, policy_names
from tests.engine.adapters.tiny import files_of
from tests.engine.drafters.tables import ngram_table
from tests.tiny import tiny_tokenizer

FAMILIES = ("t5", "llama")
LOSSLESS_RULES = {
    "bild_lab.engine.acceptance.ExactMatch",
    "bild_lab.engine.acceptance.RejectionSampling",
    "bild_lab.engine.acceptance.SpeculativeSampling",
    "bild_lab.engine.hf_generation.HuggingFaceAssisted",
    "bild_lab.engine.hf_generation.HuggingFaceEarlyExit",
    "bild_lab.engine.hf_generation.HuggingFaceGenerate",
    "bild_lab.engine.hf_generation.HuggingFacePromptLookup",
    "bild_lab.engine.ppd.pipeline.PredictivePipeline",
}
NATIVE_PARTS = ("bild_lab.engine.calm.", "bild_lab.engine.models.native.", "bild_lab.engine.ppd.")
DECODER_ONLY = {("bita", "t5"), ("medusa", "t5")}  # tests/adapters
REFUSED = {
    ("hf_early_exit", "t5"),
    *DECODER_ONLY,
}  # the first is what Transformers cannot do (tests/engine/test_hf_generation.py)
RUNNABLE = [(policy, family) for policy in policy_names() for family in FAMILIES if (policy, family) not in REFUSED]


@lru_cache
def shipped(policy: str) -> DictConfig:
    """The policy of its file, composed once for all tests; not to be changed."""
    return compose_policy(policy)


@lru_cache
def parts(policy: str) -> dict[str, object]:
    """The values of a policy's decoder, with dotted keys."""
    composed = OmegaConf.create({"policy": shipped(policy)}).policy.decoder
    return flatten(OmegaConf.to_container(composed, resolve=True))


def is_lossless(policy: str) -> bool:
    values = parts(policy)
    named = {str(value) for value in values.values()}
    return bool(LOSSLESS_RULES & named) and values.get("acceptance.lenience", 1.0) == 1.0


def is_peer(policy: str) -> bool:
    """It runs the modules of Transformers, whatever engine is chosen."""
    return str(parts(policy)["_target_"]).startswith("bild_lab.engine.hf_generation.")


def needs_native(policy: str) -> bool:
    """A part of it works on the native engine's own structures."""
    return any(str(value).startswith(NATIVE_PARTS) for value in parts(policy).values())


def engines(policy: str) -> tuple[str, ...]:
    """On which engines it is another computation."""
    if is_peer(policy):
        return ("hf",)
    return ("native",) if needs_native(policy) else ("native", "hf")


def load(checkpoints: Path, family: str, policy: str, **knobs: object) -> bild_lab.Decoder:
    """A policy on the tiny checkpoints of a family, with the files it needs."""
    if policy in policy_names() and "table" in shipped(policy):
        knobs = {"table": str(ngram_table(checkpoints / family)), **knobs}
    knobs = {**files_of(policy, Checkpoint(str(checkpoints / "llama")).config, checkpoints), **knobs}
    draft = str(checkpoints / f"{family}-draft")
    return bild_lab.load(str(checkpoints / family), draft, policy, second_draft=draft, **knobs)


def in_memory(module: PreTrainedModel, engine: str = "hf") -> HuggingFaceModel:
    """A module as a loaded model, without files: a tied head, as T5's must be in a file, repeats one token."""
    checkpoint = Checkpoint("in memory")
    encoder_decoder = module.config.is_encoder_decoder
    vars(checkpoint).update(
        config=module.config, tokenizer=tiny_tokenizer(encoder_decoder), generation=module.generation_config
    )
    kind = NativeModel if engine == "native" else HuggingFaceModel
    model = kind(checkpoint, module.device, module.dtype)
    model.module = module
    if isinstance(model, NativeModel):
        model.decoder = (T5Decoder if encoder_decoder else LlamaDecoder)(copy.deepcopy(module))
    return model
