"""What must not reach a log, an error or a tracker: keys, tokens and passwords."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

HIDDEN: Final = "***"
_NAMES: Final = re.compile(
    r"(.*[_.-])?(api_?key|access_?key(_id)?|secret(_?key)?|password|passwd|private_?key|(auth|access|bearer|hf)_?token"
    r"|credentials?|authorization)",
    re.IGNORECASE,
)
_VARIABLES: Final = re.compile(r"(.*_)?(KEY|TOKEN|SECRET|PASSWORD|PASS|PAT)")
"""Names of environment variables: in a configuration `eos_token` and `tls_key` are harmless."""
_IN_URL: Final = re.compile(r"(?<=://)[^/@\s]+@")


def is_secret(name: str) -> bool:
    """Whether a configuration key, or an environment variable, is called as one whose value is a secret."""
    return _NAMES.fullmatch(name) is not None or _VARIABLES.fullmatch(name) is not None


def without_passwords(text: str) -> str:
    """Return a text in which no URL has a user name or a password."""
    return _IN_URL.sub(f"{HIDDEN}@", text)


def without_secrets(data: Any) -> Any:
    """Return nested data, such as a configuration, with `***` for each secret: by its name, or inside a URL."""
    if isinstance(data, Mapping):
        return {
            name: HIDDEN if isinstance(value, str) and value and is_secret(str(name)) else without_secrets(value)
            for name, value in data.items()
        }
    if isinstance(data, list | tuple):
        return [without_secrets(value) for value in data]
    return without_passwords(data) if isinstance(data, str) else data
