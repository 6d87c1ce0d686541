"""How many positions a model of Transformers has: by its tables, by its rotations, and in a
session.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

# fields that say how many positions a model has
POSITIONS = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
TABLES = ("pos", "wpe")  # in the name of a table of positions
# model types whose modules compute a bias for so many positions, and fail beyond them, with the
# field that says how many
BIASED = {"mpt": "max_seq_len"}
# a parameter of decoders that predict several tokens at once, and also read the position after each
# row's: ProphetNet's
AHEAD = "ngram_embeddings"
OFFSET = 2  # some tables begin with rows for padding
CHANGING = ("dynamic", "longrope")  # rotations that depend on the length of the whole text


def learned_positions(module: nn.Module, config: PreTrainedConfig) -> int | None:
    """For how many positions an encoder or decoder has learned or tabulated embeddings; None if for
    any number.

    config: of its whole model. The weights may be on the meta device.
    """
    config = config.get_text_config(decoder=True)
    if config.model_type in BIASED:
        return getattr(config, BIASED[config.model_type])
    sizes = counts_in(config, POSITIONS)
    table_sizes: list[int] = []
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.ndim != 2 or not any(table_name in name for table_name in TABLES):
            continue
        rows = tensor.shape[0]
        table_sizes += [
            min(size, rows - rows_before_first_position(module, name))
            for size in sizes
            if size <= rows <= size + OFFSET
        ]
    if table_sizes and any(AHEAD in name for name, _ in module.named_parameters()):
        return min(table_sizes) - 1
    return min(table_sizes, default=None)


def counts_in(config: PreTrainedConfig, names: Sequence[str]) -> set[int]:
    """The values of these settings that are whole numbers above 0."""
    values = [getattr(config, name, None) for name in names]
    return {value for value in values if isinstance(value, int) and value > 0}


def rows_before_first_position(module: nn.Module, table_name: str) -> int:
    """How many rows of a table of positions come before the first one: those up to the row for
    padding, where there is one, as RoBERTa's relatives count from the row after it.
    """
    embedding = module.get_submodule(table_name.rpartition(".")[0])
    padding = embedding.padding_idx if isinstance(embedding, nn.Embedding) else None
    return 0 if padding is None else padding + 1


def original_context(config: PreTrainedConfig) -> int | None:
    """The context that a scaled rotation was made from; None without such a rotation."""
    scaled = [rotation.get("original_max_position_embeddings") for rotation in rotations(config)]
    return max((length for length in scaled if isinstance(length, int)), default=None)


def changing_rotation(config: PreTrainedConfig) -> int | None:
    """Up to how many positions all rows have one rotation, if a longer text changes it; else
    None.
    """
    changing = [rotation for rotation in rotations(config) if rotation.get("rope_type") in CHANGING]
    lengths = [
        rotation.get("original_max_position_embeddings") or config.max_position_embeddings
        for rotation in changing
    ]
    return min(lengths, default=None)


def trained_positions(config: PreTrainedConfig) -> int | None:
    """How many positions a rotary model was trained for, or scaled to; None without rotations.

    It runs longer texts, but nobody says that it understands them. A linear or dynamic scaling
    multiplies the configuration's length and YaRN the original one (so does vLLM, in the function
    _get_and_verify_max_len); a length beside other scalings, or one for each kind of layer, is the
    scaled one already.
    """
    config = config.get_text_config(decoder=True)
    length, scaled = getattr(config, "max_position_embeddings", None), rotations(config)
    if not isinstance(length, int) or not scaled[0] or getattr(config, "alibi", False):
        return None
    kind, factor = scaled[0].get("rope_type"), scaled[0].get("factor") or 1
    if len(scaled) > 1 or kind not in ("linear", "dynamic", "yarn"):
        return length
    original = scaled[0].get("original_max_position_embeddings") if kind == "yarn" else None
    return max(length, int(factor * (original or length)))


def max_session_positions(module: PreTrainedModel) -> int | None:
    """The longest text that a session of this module can run, in tokens; None for any length."""
    config = module.config.get_text_config(decoder=True)
    decoder = module.get_decoder() if module.config.is_encoder_decoder else module
    limits = (learned_positions(decoder, config), changing_rotation(config))
    return min((limit for limit in limits if limit is not None), default=None)


def rotations(config: PreTrainedConfig) -> list[dict]:
    """The rotary settings of a configuration: of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [rotation for rotation in parameters.values() if isinstance(rotation, dict)]
    return by_kind or [parameters]
