"""Results of version 1 of `result.json`, which earlier versions of the package wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# the keys that version 2 has under "counts"; older files lack some of them
_COUNTS = (
    "tokens_per_target_call",
    "acceptance_rate",
    "nothing_accepted",
    "drafted",
    "accepted",
    "draft_calls",
    "target_calls",
    "fallbacks",
    "rollbacks",
    "exit_layer_mean",
    "acceptance_by_position",
    "accepted_by_depth",
)


def upgraded(content: Mapping[str, Any]) -> dict[str, Any]:
    """The content of a file of version 1 in the form of version 2.

    In version 1 the counts were top-level keys, and "stored_at" was called "stored".
    """
    rest = {key: value for key, value in content.items() if key not in _COUNTS}
    return {**rest, "counts": {key: content.get(key) for key in _COUNTS}, "stored_at": content.get("stored")}
