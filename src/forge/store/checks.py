"""Rules that several calls of the store share."""

from __future__ import annotations

from forge.errors import StoreError


def check_whole_number(path: str, value: object, *, least: int) -> None:
    """Raise unless `value` is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise StoreError(
            f"{path} is not valid", path=path, value=value, rule=f"a whole number >= {least}", repair=f"give {least}"
        )
