"""The table of a self-play league: the file in a run's folder, and how it reads on a terminal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from forge.errors import DataError

LEAGUE_TABLE: Final = "league.json"
"""The file in the folder of a run: `step`, the live policy's `rating`, and `members` with a row for each opponent."""
MAX_BYTES: Final = 1 << 20
"""A table with thousands of members is not larger."""
_NUMBERS: Final = ("rating", "games", "wins", "draws", "losses")


def read_league(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the table of a run's league. `DataError` where there is none, or it cannot be read."""
    path = Path(folder) / LEAGUE_TABLE
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise DataError(
            "this run has no table of a league",
            path=str(path),
            rule="the folder of a run with the section episode.league, after its first step",
            repair="check the path; the run's config.yaml says whether it has a league",
        ) from None
    except OSError as error:
        raise _unreadable(path, str(error)) from None
    return parse_league(path, data)


def parse_league(path: Path, data: bytes) -> dict[str, Any]:
    """Return the table that the bytes of a file hold: all of them, or the first `MAX_BYTES` and more."""
    if len(data) > MAX_BYTES:
        raise _unreadable(path, f"it has more than {MAX_BYTES >> 20} MiB")
    try:
        found = json.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise _unreadable(path, str(error)) from None
    if not _is_table(found):
        raise _unreadable(path, "it does not hold a table")
    return dict(found)


def _is_table(found: object) -> bool:
    if not isinstance(found, dict) or not isinstance(found.get("members"), list):
        return False
    rows = found["members"]
    return isinstance(found.get("step"), int) and all(
        isinstance(row, dict)
        and isinstance(row.get("member"), str)
        and all(isinstance(row.get(key), int | float) for key in _NUMBERS)
        and isinstance(row.get("win_rate"), int | float | None)
        for row in rows
    )


def _unreadable(path: Path, why: str) -> DataError:
    return DataError(
        "the table of a league cannot be read",
        path=str(path),
        rule=f"a file that a run wrote: {why}",
        repair="delete it: the next step of the run writes it again",
    )


def league_lines(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table as text."""
    rows = table["members"]
    width = max(len("opponent"), *(len(row["member"]) for row in rows)) + 2 if rows else 0
    yield f"after step {table['step']}; games of the live policy against each opponent"
    yield ""
    yield f"{'opponent':<{width}}{'Elo':>6}{'games':>8}{'wins':>8}{'draws':>8}{'losses':>8}{'win rate':>10}"
    for row in rows:
        won = "-" if row["win_rate"] is None else f"{row['win_rate']:.1%}"
        counts = "".join(f"{row[key]:>8}" for key in ("games", "wins", "draws", "losses"))
        yield f"{row['member']:<{width}}{row['rating']:>6.0f}{counts}{won:>10}"
