"""The page and its program, made of the files of the report and of those of the UI."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from typing import Final

_REPORT: Final = "forge.observe.report"
_UI: Final = "forge.ui"
SHARED_PROGRAMS: Final = (
    "words.js", "scales.js", "table.js", "charts.js", "bar.js", "parts.js", "token_modes.js", "tokens.js", "turns.js",
    "sample.js",
)  # fmt: skip
OWN_PROGRAMS: Final = (
    "server.js",
    "place.js",
    "shell.js",
    "state.js",
    "runs.js",
    "configuration.js",
    "events.js",
    "rollouts_filters.js",
    "gradient.js",
    "rollouts_detail.js",
    "rollouts.js",
    "run.js",
    "system.js",
    "timeline_canvas.js",
    "timeline.js",
    "control.js",
    "compare_board.js",
    "compare_tables.js",
    "compare.js",
    "start.js",
)
SHARED_STYLES: Final = ("base.css", "charts.css", "samples.css")
OWN_STYLES: Final = ("ui.css", "rollouts.css", "compare.css", "timeline.css", "control.css")


@functools.cache
def program() -> str:
    """Return the page's program."""
    texts = [*(_asset(_REPORT, name) for name in SHARED_PROGRAMS), *(_asset(_UI, name) for name in OWN_PROGRAMS)]
    return "(function () {\n'use strict';\n" + "\n".join(texts) + "\n})();\n"


@functools.cache
def style() -> str:
    """Return the page's style."""
    return "\n".join([*(_asset(_REPORT, name) for name in SHARED_STYLES), *(_asset(_UI, name) for name in OWN_STYLES)])


@functools.cache
def page() -> str:
    """Return the page. Its files have their digest in their address, so that a browser keeps no old ones."""
    return (
        _asset(_UI, "ui.html")
        .replace("%%style%%", f"/assets/{digest(style())}.css")
        .replace("%%program%%", f"/assets/{digest(program())}.js")
    )


def digest(text: str) -> str:
    """Return the name of a file with this text."""
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _asset(package: str, name: str) -> str:
    return resources.files(package).joinpath("assets", name).read_text(encoding="utf-8")
