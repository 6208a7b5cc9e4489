"""One check of `forge doctor`, as it is printed."""

from __future__ import annotations

from forge.errors import ForgeError

_GIB = 1024**3
Check = dict[str, str]
"""`name`, `status` (PASS, WARN or FAIL), `detail` and `repair`, which is empty for PASS."""


def size_text(num_bytes: int) -> str:
    """Return a number of bytes for people."""
    return f"{num_bytes / _GIB:.1f} GiB" if num_bytes >= _GIB // 10 else f"{num_bytes / 1024**2:.1f} MiB"


def make_check(name: str, ok: bool, detail: str, *, repair: str = "", needed: bool = True) -> Check:
    """Return a check. What is not `needed` is a warning where it is not as it should be."""
    status = "PASS" if ok else ("FAIL" if needed else "WARN")
    return {"name": name, "status": status, "detail": detail, "repair": "" if ok else repair}


def failed_check(name: str, error: ForgeError) -> Check:
    """Return a check that failed with an error of the library."""
    rule = "" if error.rule is None else f"; needed: {error.rule}"
    return make_check(name, False, f"{error.message.rstrip('.')}{rule}", repair=error.repair or "see the message")
