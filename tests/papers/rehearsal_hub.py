"""What the hub of the rehearsals holds: tiny checkpoints under the published ids, and a few rows of
each data set.

Ids, configurations, layouts, configs and splits are those of `hub.yaml`: weights are pickles where its
cards say so, large ones lie in shards, what is a script on main has its conversion on a branch, and
what is gated wants a login with consent. `rehearsal.yaml` scales
the widths down, not the depths, and has the rows. A token is a byte, so that prompts and answers
are text.
"""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import pyarrow
import pyarrow.parquet as pq
import torch
import yaml
from safetensors.torch import load, save
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from bild_lab.papers.runs.needs import size_of
from bild_lab.papers.runs.paper_runs import hub
from tests.loopback_hub import CONVERSION, contents, pickle_of, pickled

TABLES: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("rehearsal.yaml").read_text())
SHARDED_GB, SHARDED_MB = 10, 500  # what is larger lies in shards
ROWS = {"train": 2, "validation": 3, "test": 2}
LONGEST_CHAIN = 24  # tokens of a Llama's text
# of weights, by a part of their name
SPREADS = {"o_proj": 0.005, "down_proj": 0.0015, "shared": 5.0, "lm_head": 1.0}


def byte_tokenizer(specials: list[str], template: str, **roles: str) -> PreTrainedTokenizerFast:
    """The special tokens, then a token for every byte. template: where the special tokens of a
    prompt stand.
    """
    places = {
        piece: place for place, piece in enumerate([*specials, *sorted(ByteLevel.alphabet())])
    }
    tokenizer = Tokenizer(BPE(places, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    ends = [(one, places[one]) for one in specials]
    tokenizer.post_processor = TemplateProcessing(single=template, special_tokens=ends)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **roles
    )


def scaled_configuration(name: str) -> PreTrainedConfig:
    """The real configuration of a checkpoint with the widths of `rehearsal.yaml`."""
    outline = dict(hub()["outlines"][hub()["models"][name]["outline"]])
    kind = outline.pop("model_type")
    scaled = {
        **outline,
        **TABLES["scaled"][kind],
        **TABLES["of_owner"].get(name.partition("/")[0], {}),
    }
    if "num_key_value_heads" in outline:  # as many queries share a key
        groups = outline["num_attention_heads"] // outline["num_key_value_heads"]
        scaled["num_key_value_heads"] = scaled["num_attention_heads"] // groups
    return AutoConfig.for_model(kind, **scaled)


def tiny_checkpoint(name: str, folder: Path) -> Mapping[str, bytes]:
    """The files of a published checkpoint, tiny.

    A weight's values come from its name, so a shallow model is the beginning of a deep one. T5s
    have noise of their own on them: they agree often, but not always. A Llama prefers the token
    after the last one, and ends after 24.
    """
    config, generator = scaled_configuration(name), torch.Generator()
    encoder_decoder = bool(config.is_encoder_decoder)
    model = (AutoModelForSeq2SeqLM if encoder_decoder else AutoModelForCausalLM).from_config(config)
    for key, weight in model.named_parameters():
        if weight.ndim == 1:  # of a norm
            continue
        spread = next((size for part, size in SPREADS.items() if part in key), 0.3)
        weight.data = spread * torch.randn(
            weight.shape, generator=generator.manual_seed(crc32(key.encode()))
        )
        if encoder_decoder:
            own = torch.randn(
                weight.shape, generator=generator.manual_seed(crc32(f"{name} {key}".encode()))
            )
            weight.data += 0.15 * spread * own
    if not encoder_decoder:
        prefer_next(model)
    model.to(
        torch.float16 if hub()["models"][name]["stored"] == 2 else torch.float32
    ).save_pretrained(folder)
    byte_tokenizer(**TABLES["tokenizers"][config.model_type]).save_pretrained(folder)
    return contents(folder)


def prefer_next(model: PreTrainedModel) -> None:
    """Make the token after the last one the most likely, and in the place of every 24th the end.

    A random head has tokens that it mistakes for another's: with this seed none is on the way of an
    answer.
    """
    embedding, head = (
        model.get_input_embeddings().weight.data,
        model.get_output_embeddings().weight.data,
    )
    embedding.normal_(generator=torch.Generator().manual_seed(7))
    head.zero_()
    for token, row in enumerate(embedding):
        after = (token + 1) % len(embedding)
        head[model.config.eos_token_id if after % LONGEST_CHAIN == 0 else after] += (
            8 * row / len(row)
        )


def checkpoints(folder: Path) -> dict[str, Mapping[str, bytes]]:
    """Every checkpoint of `hub.yaml` whose configuration is known, in its format; where that is not
    known, those for CNN/DailyMail in pickles and the others in safetensors.
    """
    served = {}
    for name, card in hub()["models"].items():
        if not card["stored"] or not card["outline"]:
            continue
        pickles = card.get("format", "pickle" if "cnndm" in name else "safetensors") == "pickle"
        large = card["stored"] * size_of(name).weights > SHARDED_GB * 1e9
        files = tiny_checkpoint(name, folder / name)
        served[name] = sharded(files, pickles) if large else pickled(files) if pickles else files
    return served


def sharded(files: Mapping[str, bytes], pickles: bool) -> dict[str, bytes]:
    """A checkpoint whose weights are in two shards and their index."""
    tensors = load(files["model.safetensors"])
    stem, suffix = ("pytorch_model", "bin") if pickles else ("model", "safetensors")
    names = [f"{stem}-{shard:05d}-of-00002.{suffix}" for shard in (1, 2)]
    parts: tuple[dict[str, torch.Tensor], ...] = ({}, {})
    places = {}
    for number, (key, tensor) in enumerate(sorted(tensors.items())):
        parts[number % 2][key] = tensor
        places[key] = names[number % 2]
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    others = {name: files[name] for name in files if name != "model.safetensors"}
    written = {
        name: pickle_of(part) if pickles else save(part, metadata={"format": "pt"})
        for name, part in zip(names, parts, strict=True)
    }
    return {**others, **written, f"{stem}.{suffix}.index.json": json.dumps(index).encode()}


def gated() -> list[str]:
    """The repositories that want a login with consent."""
    return [
        name
        for kind in ("models", "datasets")
        for name, card in hub()[kind].items()
        if card.get("gated")
    ]


def rows_of(dataset: str, split: str) -> list[dict[str, Any]]:
    """The rows of a split, each with its split and number in its texts."""
    row = json.dumps(TABLES["rows"][dataset], ensure_ascii=False)
    return [json.loads(row.replace("{n}", f"{split} {number}")) for number in range(ROWS[split])]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def shards(rows: list[dict[str, Any]], card: Mapping[str, Any], split: str) -> list[list[Any]]:
    """The rows of each file of a split: the training texts of a large data set lie in two."""
    middle = len(rows) // 2 if split == "train" and card["mb"] > SHARDED_MB else len(rows)
    return [part for part in (rows[:middle], rows[middle:]) if part]


def datasets() -> dict[str, dict[str, bytes]]:
    """Each data set in its layout: parquet by split, large ones in shards, a script with the branch
    of its conversion, or JSON.
    """
    found = {}
    for name in TABLES["rows"]:
        card = hub()["datasets"][name]
        config = next(iter(card["configs"]), "data")
        splits = {split: rows_of(name, split) for split in card["splits"]}
        if card.get("script"):
            files = {
                f"{config}/{split}/{number:04d}.parquet": parquet(rows)
                for split in splits
                for number, rows in enumerate(shards(splits[split], card, split))
            }
            found[name] = {f"{name.partition('/')[2]}.py": b"raise SystemExit('a script ran')"}
            found[f"{name}@{CONVERSION}"] = files
        elif config.endswith(".json"):
            found[name] = {config: json.dumps(splits["train"]).encode()}
        else:
            files = {}
            for split in splits:
                parts = shards(splits[split], card, split)
                for number, rows in enumerate(parts):
                    place = f"{config}/{split}-{number:05d}-of-{len(parts):05d}.parquet"
                    files[place] = parquet(rows)
            listed = "\n".join(
                f"  - split: {split}\n    path: {config}/{split}-*" for split in splits
            )
            card_name = "default" if config == "data" else config
            header = f'---\nconfigs:\n- config_name: "{card_name}"\n  data_files:\n{listed}\n---\n'
            found[name] = {**files, "README.md": header.encode()}
    return found
