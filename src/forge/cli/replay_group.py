"""`forge replay RUN --group N`: sample a group again, and show the first token that differs."""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.loops.replay.groups import GroupResult, SpanResult
    from forge.loops.replay.recorded import RecordedRun


def replay_group(recorded: RecordedRun, arguments: argparse.Namespace) -> int:
    """Sample a group again, print what was found, and return the exit code."""
    from forge.loops.replay.groups import resample_group

    found = asyncio.run(resample_group(recorded, arguments.group, tolerance=arguments.tolerance))
    if arguments.json:
        print(json.dumps(_plain(found), indent=2))
    else:
        _print(found)
    return 0 if found.is_same else 1


def _print(found: GroupResult) -> None:
    print(f"group {found.number}, which step {found.step} learned from:")
    for version in found.versions:
        verdict = "as published" if version.is_same else f"differs: {version.recorded} was published"
        print(f"  version {version.number}: weights {version.digest}, {verdict}")
    for span in found.spans:
        print(f"  sample {span.member}, turn {span.turn}, tokens {span.start} to {span.end - 1}: {_verdict(span)}")
    how = "bit for bit" if not found.tolerance else f"with logprobs within {found.tolerance:g}"
    print(f"group {found.number}: {f'identical, {how}' if found.is_same else 'differs'}")


def _verdict(span: SpanResult) -> str:
    if not span.is_compared:
        return "not compared: an earlier token differs"
    if span.first is None:
        return f"identical (version {span.version})"
    first = span.first
    is_token = first.recorded[0] != first.sampled[0]
    what = (
        f"token {first.place} was {first.recorded[0]}, is now {first.sampled[0]}"
        if is_token
        else f"same tokens; the logprob of token {first.place} was {first.recorded[1]!r}, is now {first.sampled[1]!r}"
    )
    return f"{what} (version {span.version}; cause: {first.cause})"


def _plain(found: GroupResult) -> dict[str, Any]:
    versions = [{"version": each.number, "digest": each.digest, "recorded": each.recorded} for each in found.versions]
    spans = [asdict(span) | {"is_same": span.is_same} for span in found.spans]
    return {
        "group": found.number,
        "step": found.step,
        "is_same": found.is_same,
        "tolerance": found.tolerance,
        "versions": versions,
        "spans": spans,
    }
