"""The page itself: a template with styles, programs and data put into it.

Completions can be any text, and some are written to break out of a page. So no text of the run ever becomes markup: the
data is JSON in an element that browsers do not run, with every character escaped that could end that element, and the
programs put it into the page as text. A content security policy lets only the page's own style and program run, by
their digests, and lets nothing be fetched.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from forge._version import __version__
from forge.errors import DataError
from forge.observe.report.charts import choose_charts
from forge.observe.report.headline import facts, headline
from forge.observe.report.reading import Run, read_run

DEFAULT_SAMPLES: Final = 400
_PROGRAMS: Final = (
    "data.js", "words.js", "scales.js", "table.js", "charts.js", "bar.js", "parts.js", "token_modes.js", "tokens.js",
    "turns.js", "sample.js", "samples.js", "page.js",
)  # fmt: skip
_STYLES: Final = ("base.css", "charts.css", "samples.css")


@dataclass(frozen=True, slots=True)
class Report:
    """A page that was written.

    Attributes:
        path: the file.
        num_bytes: its size.
        last_step: the step up to which it shows the run.
        num_shown, num_samples: samples in the page, and samples that the run wrote.
        notes: what is not in it, in sentences.
    """

    path: Path
    num_bytes: int
    last_step: int
    num_shown: int
    num_samples: int
    notes: tuple[str, ...]


def write_report(
    run_dir: str | os.PathLike[str],
    *,
    output: str | os.PathLike[str] | None = None,
    max_samples: int = DEFAULT_SAMPLES,
    clock: Callable[[], float] = time.time,
) -> Report:
    """Write the page of a run to `output`, or to `report.html` in the run's folder.

    The file appears whole or not at all. The run may still be going on: the page shows what it wrote so far.
    """
    run = read_run(run_dir, max_samples=max_samples)
    content = render(run, made_at=clock()).encode("utf-8", "replace")
    path = Path(output) if output is not None else run.folder / "report.html"
    _write(path, content)
    return Report(
        path=path,
        num_bytes=len(content),
        last_step=run.metrics.last_step,
        num_shown=len(run.samples.items),
        num_samples=run.samples.num_samples,
        notes=run.notes,
    )


def render(run: Run, *, made_at: float) -> str:
    """Return the page as text."""
    style = "\n".join(_asset(name) for name in _STYLES)
    program = "(function () {\n'use strict';\n" + "\n".join(_asset(name) for name in _PROGRAMS) + "\n})();\n"
    policy = (
        f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(program)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "title": html.escape(run.folder.resolve().name),
        "policy": html.escape(policy, quote=True),
        "style": style,
        "program": program,
        "data": embed(describe(run, made_at=made_at)),
    }
    pieces = _asset("report.html").split("%%")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def describe(run: Run, *, made_at: float) -> dict[str, Any]:
    """Return all that the page's programs read."""
    metrics, samples = run.metrics, run.samples
    total = run.setting("training.max_steps")
    return {
        "run": {
            "name": run.folder.resolve().name,
            "forge": __version__,
            "lastStep": metrics.last_step,
            "totalSteps": total if isinstance(total, int) else None,
            "firstTime": metrics.first_time,
            "lastTime": metrics.last_time,
            "madeAt": made_at,
            "maskTruncated": run.setting("rollout.mask_truncated") is True,
        },
        "facts": facts(run),
        "tiles": headline(metrics),
        "steps": metrics.steps,
        "times": metrics.times,
        "tokens": metrics.tokens,
        "columns": metrics.columns,
        "nonfinite": metrics.nonfinite,
        "charts": choose_charts(metrics),
        "samples": {
            "items": samples.items,
            "prompts": samples.prompts,
            "messages": samples.messages,
            "written": samples.num_samples,
            "numSteps": samples.num_steps,
        },
        "ledger": run.ledger,
        "league": run.league,
        "config": run.config_text,
        "changes": run.changes,
        "notes": run.notes,
    }


def embed(value: object) -> str:
    """JSON that may stand inside an element of a page: ASCII alone, and nothing in it that could be markup."""
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _asset(name: str) -> str:
    return resources.files("forge.observe.report").joinpath("assets", name).read_text(encoding="utf-8")


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex}.part")
    try:
        try:
            part.write_bytes(content)
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(
            "the report cannot be written",
            path=str(path),
            rule=f"a file in an existing, writable folder: {error.strerror}",
            repair="give another --output",
        ) from error
