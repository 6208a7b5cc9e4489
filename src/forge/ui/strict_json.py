"""JSON that every browser reads: a number that is not finite becomes null, and so does what is nested too deep."""

from __future__ import annotations

import json
import math
from typing import Any, Final

MAX_DEPTH: Final = 100
_LARGEST: Final = 1 << 1024


def to_json(value: object) -> str:
    """Return a value as JSON on one line."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (ValueError, RecursionError):
        return json.dumps(_plain(value, 0), allow_nan=False, separators=(",", ":"))


def _plain(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        return None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value if abs(value) < _LARGEST else None
    if isinstance(value, dict):
        return {key: _plain(each, depth + 1) for key, each in value.items()}
    return [_plain(each, depth + 1) for each in value] if isinstance(value, list | tuple) else value
