"""How long a text a model can read: its learned positions, or a rotation that changes with the length."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_encoder_position_embeddings",
    "max_decoder_position_embeddings",
)
TABLES = ("pos", "wpe")  # in the name of a table of positions
OFFSET = 2  # some tables begin with rows for padding
CHANGING = ("dynamic", "longrope")  # rotations that depend on the length of the whole text


def learned_positions(part: nn.Module, config: PreTrainedConfig) -> int | None:
    """For how many positions an encoder or decoder has learned or tabulated embeddings; None if for any number.

    config: of its whole model. The weights may be on the meta device.
    """
    config = config.get_text_config(decoder=True)
    sizes = {size for name in NAMES if isinstance(size := getattr(config, name, None), int) and size > 0}
    tables = [*part.named_parameters(), *part.named_buffers()]
    rows = [each.shape[0] for name, each in tables if any(part in name for part in TABLES) and each.ndim == 2]
    found = [size for size in sizes for count in rows if size <= count <= size + OFFSET]
    return min(found, default=None)


def original_context(config: PreTrainedConfig) -> int | None:
    """The context that a scaled rotation was made from; None without such a rotation."""
    scaled = [each.get("original_max_position_embeddings") for each in rotations(config)]
    return max((length for length in scaled if isinstance(length, int)), default=None)


def changing_rotation(config: PreTrainedConfig) -> int | None:
    """Up to how many positions all rows have one rotation, if a longer text changes it; else None."""
    changing = [each for each in rotations(config) if each.get("rope_type") in CHANGING]
    lengths = [each.get("original_max_position_embeddings") or config.max_position_embeddings for each in changing]
    return min(lengths, default=None)


def most_positions(module: PreTrainedModel) -> int | None:
    """The longest text that a session of this module can run, in tokens; None for any length."""
    config = module.config.get_text_config(decoder=True)
    decoder = module.get_decoder() if module.config.is_encoder_decoder else module
    limits = (learned_positions(decoder, config), changing_rotation(config))
    return min((limit for limit in limits if limit is not None), default=None)


def rotations(config: PreTrainedConfig) -> list[dict]:
    """The rotary settings of a configuration: of all layers, or of each kind of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_kind = [each for each in parameters.values() if isinstance(each, dict)]
    return by_kind or [parameters]
