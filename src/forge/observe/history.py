"""The history checker: whether a run's files show that each group counted once and no token was too old.

It reads the files alone (ledger, checkpoints, rollouts, journals, trace) and shares no code with what wrote them, so
that a defect there cannot hide itself. `forge history RUN_DIR` prints what it finds.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forge.errors import DataError

_STEP_FILE: Final = re.compile(r"step_(\d+)\.jsonl")
_JOURNAL: Final = re.compile(r"(\d+)-\d+\.jsonl")
_MOST_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class Violation:
    """A place where the files contradict a guarantee.

    Attributes:
        rule: the guarantee, by its name in `RULES`.
        where: the file, with a line where one shows it.
        what: what was found there.
    """

    rule: str
    where: str
    what: str


RULES: Final[Mapping[str, str]] = {
    "readable": "every whole line of a file can be read",
    "once": "no group is committed twice",
    "none_lost": "every group that was given out is committed, or pending in the checkpoint",
    "order": "the steps of the ledger and of the metrics never go back",
    "returned": "a group whose step was discarded by a resume was committed again, or is pending",
    "recorded": "the rollouts of a step are those of the groups that the ledger says it trained on",
    "staleness": "no trained token is older than rollout.staleness allowed then, and none is from later weights",
    "journals": "no journal is left of a group that was committed",
    "trained_in_order": "in the trace training steps follow one another, and repeated ones start from a saved step",
}
"""What is checked, by name."""


@dataclass(slots=True)
class History:
    """What the files of a run say.

    Attributes:
        counts: what was read, by name: so many groups, steps, tokens and files.
        violations: what contradicts a guarantee; empty for a run that kept all of them.
        skipped: rules that could not be checked, with the reason.
    """

    counts: Counter[str] = field(default_factory=Counter)
    violations: list[Violation] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        """Whether no guarantee was broken."""
        return not self.violations

    def plain(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        violations = [{"rule": each.rule, "where": each.where, "what": each.what} for each in self.violations]
        return {"counts": dict(self.counts), "violations": violations, "skipped": dict(self.skipped)}


def check_history(folder: str | Path) -> History:
    """Check the files of a run of reinforcement learning. The run may be over, stopped or killed, but not running.

    `DataError` where the folder holds no such run.
    """
    return _Checker(Path(folder)).check()


class _Checker:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found = History()
        self._committed: dict[int, int] = {}
        """The step of each group that the ledger has."""

    def check(self) -> History:
        config = self._config()
        checkpoints = sorted(self._checkpoints(config), key=lambda each: int(each["step"]))
        self._check_ledger()
        for checkpoint in checkpoints:
            self._check_complete(checkpoint)
        if not checkpoints:
            self._found.skipped["none_lost"] = "there is no checkpoint"
        newest = checkpoints[-1] if checkpoints else None
        self._check_discarded(newest)
        self._check_rollouts(config, newest)
        self._check_journals()
        self._check_metrics()
        self._check_trace()
        return self._found

    # ---- The ledger ----------------------------------------------------------------------------------------------

    def _check_ledger(self) -> None:
        path, last = self._folder / "ledger.jsonl", 0
        for number, line in self._lines(path):
            step, group, where = line["step"], line["group"], f"{path.name}:{number}"
            if group in self._committed:
                earlier = self._committed[group]
                self._violate("once", where, f"group {group} is committed in step {earlier} and in step {step}")
            if step < last:
                self._violate("order", where, f"step {step} after step {last}")
            self._committed.setdefault(group, step)
            self._found.counts["groups"] += 1
            self._found.counts[f"groups {line['outcome']}"] += 1
            last = max(last, step)
        self._found.counts["steps"] = last

    def _check_complete(self, checkpoint: Mapping[str, Any]) -> None:
        """Compare the ledger up to a checkpoint's step with the groups that the checkpoint says are pending."""
        step, buffer = int(checkpoint["step"]), checkpoint["buffer"]
        pending, where = set(buffer["pending"]), f"checkpoint of step {step}"
        before = checkpoint.get("ledger_before") or {"next_number": 0, "pending": []}
        given = set(range(int(before["next_number"]), int(buffer["next_number"]))) | set(before["pending"])
        done = {group for group, at in self._committed.items() if at <= step}
        if lost := sorted(given - done - pending):
            self._violate("none_lost", where, f"neither committed nor pending: {_some(lost)}")
        if both := sorted(done & pending):
            self._violate("once", where, f"committed and pending: {_some(both)}")
        if unknown := sorted(done - given):
            self._violate("none_lost", where, f"committed and never given out: {_some(unknown)}")
        self._found.counts["checkpoints"] += 1

    def _check_discarded(self, newest: Mapping[str, Any] | None) -> None:
        path = self._folder / "ledger.discarded.jsonl"
        pending = set(newest["buffer"]["pending"]) if newest else set()
        upper = int(newest["buffer"]["next_number"]) if newest else 0
        for number, line in self._lines(path, is_required=False):
            group = line["group"]
            self._found.counts["groups discarded by a resume"] += 1
            if newest is not None and group < upper and group not in self._committed and group not in pending:
                self._violate("returned", f"{path.name}:{number}", f"group {group} did not come back")

    # ---- Rollouts: what was trained on, and by which weights it was sampled ----------------------------------------

    def _check_rollouts(self, config: Mapping[str, Any], newest: Mapping[str, Any] | None) -> None:
        folder = self._folder / "rollouts"
        bounds = self._bounds(int(_section(config, "rollout").get("staleness", 0)))
        kept = _section(config, "record").get("rollouts", "all")
        files = [(int(found[1]), path) for path in folder.glob("step_*.jsonl") if (found := _name(_STEP_FILE, path))]
        if not files:
            reason = f"there are no rollouts of steps (record.rollouts is {kept})"
            self._found.skipped |= {"recorded": reason, "staleness": reason}
            return
        trained = self._trained()
        for step, path in sorted(files):
            bound = bounds[bisect_left(bounds, (step, 0)) - 1][1]
            groups = {self._check_episode(step, path, number, line, bound) for number, line in self._lines(path)}
            self._found.counts["files of rollouts"] += 1
            if extra := sorted(groups - trained[step]):
                self._violate("recorded", path.name, f"not trained on in step {step}: {_some(extra)}")
            if kept == "all" and (missing := sorted(trained[step] - groups)):
                self._violate("recorded", path.name, f"trained on in step {step}, but not there: {_some(missing)}")
        last = int(newest["step"]) if newest else 0
        absent = sorted(step for step in trained if step <= last and step not in dict(files)) if kept == "all" else []
        if absent:
            self._violate("recorded", folder.name, f"no rollouts of steps {_some(absent)}")

    def _bounds(self, last: int) -> list[tuple[int, int]]:
        """Return the bounds on staleness, each with the step after which it held, ascending; `last` is that of the
        configuration. A change takes the place of those that were recorded before it, of the same step or later ones:
        the run went back to an earlier checkpoint."""
        found: list[tuple[int, int]] = []
        first: int | None = None
        command: list[Mapping[str, Any]] = []
        for _, each in self._lines(self._folder / "runtime_changes.jsonl", is_required=False):
            command.append(each)
            if each.get("num_left", 0):
                continue  # all lines of a command count, or none
            for line in (line for line in command if line["key"] == "rollout.staleness"):
                first = line["before"] if first is None else first
                found = [kept for kept in found if kept[0] < line["step"]] + [(line["step"], line["after"])]
                self._found.counts["changes of rollout.staleness"] += 1
            command = []
        return [(-1, last if first is None else first), *found]

    def _trained(self) -> dict[int, set[int]]:
        trained: dict[int, set[int]] = defaultdict(set)
        for _, line in self._lines(self._folder / "ledger.jsonl"):
            if line["outcome"] == "trained":
                trained[line["step"]].add(line["group"])
        return trained

    def _check_episode(self, step: int, path: Path, number: int, line: Mapping[str, Any], bound: int) -> int:
        """Check the weights of an episode's trained tokens, and return its group. Step s has batch s - 1, which the
        weights of version s - 1 learn from."""
        newest = step - 1
        for version, start, end in line["versions"]:
            if not _is_learned(line, start):
                continue
            self._found.counts["tokens"] += end - start
            if not newest - bound <= version <= newest:
                what = f"tokens {start} to {end} of group {line['group']} are of version {version}"
                rule = f"step {step} may learn from {max(0, newest - bound)} to {newest}"
                self._violate("staleness", f"{path.name}:{number}", f"{what}; {rule}")
        return int(line["group"])

    # ---- The other files -------------------------------------------------------------------------------------------

    def _check_journals(self) -> None:
        for path in sorted((self._folder / "journals").rglob("*.jsonl")):
            found = _name(_JOURNAL, path)
            if found is not None and int(found[1]) in self._committed:
                step = self._committed[int(found[1])]
                self._violate("journals", path.name, f"group {found[1]} was committed in step {step}")
            self._found.counts["journals"] += 1

    def _check_metrics(self) -> None:
        path, last = self._folder / "metrics.jsonl", 0
        if not path.exists():
            self._found.skipped.setdefault("metrics", "there is no metrics.jsonl")
            return
        for number, line in self._lines(path):
            if line["step"] < last:
                self._violate("order", f"{path.name}:{number}", f"step {line['step']} after step {last}")
            last = max(last, line["step"])

    def _check_trace(self) -> None:
        """Follow the trace's training steps. `train` has the step that it starts from; so has `save`."""
        path = self._folder / "trace.json"
        if not path.exists():
            self._found.skipped["trained_in_order"] = "there is no trace.json (record.trace)"
            return
        texts = path.read_text(encoding="utf-8", errors="replace").splitlines()
        events = [event for text in texts if (event := _decoded(text.strip().strip(",").encode())) is not None]
        saved, expected = {0}, None
        for event in sorted((each for each in events if each.get("ph") == "X"), key=lambda each: float(each["ts"])):
            step = event.get("args", {}).get("step")
            if event["name"] == "save" and step is not None:
                saved.add(step)
            if event["name"] != "train" or step is None:
                continue
            if expected is not None and step != expected and not (step < expected and step in saved):
                what = f"step {step + 1} follows step {expected}; no checkpoint of step {step} was saved before it"
                self._violate("trained_in_order", path.name, what)
            expected = step + 1
            self._found.counts["training steps in the trace"] += 1

    # ---- Reading -----------------------------------------------------------------------------------------------------

    def _config(self) -> Mapping[str, Any]:
        from forge.config.yaml_text import read_yaml

        path = self._folder / "config.yaml"
        try:
            data = read_yaml(path.read_text(encoding="utf-8"), source=str(path)).data
        except OSError as error:
            raise self._not_a_run(error.strerror or str(error)) from None
        if not isinstance(data, Mapping) or not (self._folder / "ledger.jsonl").exists():
            raise self._not_a_run("it has no ledger.jsonl")
        return data

    def _not_a_run(self, why: str) -> DataError:
        return DataError(
            f"this folder has no history that could be checked: {why}",
            path=str(self._folder),
            rule="the folder of a run of reinforcement learning, with config.yaml and ledger.jsonl",
            repair="name the folder RUN_OUTPUT_DIR/RUN_NAME of a run that has taken a step",
        )

    def _checkpoints(self, config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        given = _section(config, "checkpointing").get("output_dir")
        folder = Path(given) if given else self._folder / "checkpoints"
        for path in folder.glob("step-*/checkpoint.json"):
            document = _decoded(path.read_bytes())
            if document is None:
                self._violate("readable", str(path), "it is not a JSON object")
                continue
            caller = document.get("extra", {}).get("caller")
            if isinstance(caller, Mapping) and "buffer" in caller:
                yield caller

    def _lines(self, path: Path, *, is_required: bool = True) -> Iterator[tuple[int, Mapping[str, Any]]]:
        """Yield the lines of a file with their numbers. A last line without an end was cut off by a kill."""
        if not is_required and not path.exists():
            return
        with open(path, "rb") as file:
            for number, raw in enumerate(file, start=1):
                if not raw.endswith(b"\n"):
                    self._found.counts["lines cut off by a kill"] += 1
                    return
                line = _decoded(raw)
                if line is None:
                    self._violate("readable", f"{path.name}:{number}", raw[:80].decode(errors="replace"))
                else:
                    yield number, line

    def _violate(self, rule: str, where: str, what: str) -> None:
        violation = Violation(rule, where, what)
        if violation not in self._found.violations:
            self._found.violations.append(violation)


def history_lines(found: History) -> Iterator[str]:
    """Yield what a check found, as text."""
    counts = ", ".join(f"{count:,} {name}" for name, count in found.counts.items() if count)
    yield f"read: {counts}"
    broken = Counter(each.rule for each in found.violations)
    for name, text in RULES.items():
        state = "skipped" if name in found.skipped else f"BROKEN {broken[name]} times" if broken[name] else "ok"
        reason = f" ({found.skipped[name]})" if name in found.skipped else ""
        yield f"{state:<10} {name}: {text}{reason}"
    for each in found.violations[: 10 * _MOST_SHOWN]:
        yield f"  {each.rule}: {each.where}: {each.what}"
    if len(found.violations) > 10 * _MOST_SHOWN:
        yield f"  and {len(found.violations) - 10 * _MOST_SHOWN} more"


def _is_learned(line: Mapping[str, Any], start: int) -> bool:
    """Return whether the token at a place counts in the loss: not if its turn or its agent does not learn."""
    agents = line.get("agents", {})
    for turn in line.get("turns", ()):
        if turn["start"] <= start < turn["end"]:
            is_agent_learning = "agent" not in turn or agents.get(turn["agent"], {}).get("learns", True)
            return bool(turn["is_trained"] and is_agent_learning)
    return True


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = config.get(name)
    return found if isinstance(found, Mapping) else {}


def _name(pattern: re.Pattern[str], path: Path) -> re.Match[str] | None:
    return pattern.fullmatch(path.name)


def _decoded(raw: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(raw)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _some(numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _MOST_SHOWN} more" if len(numbers) > _MOST_SHOWN else ""
    return ", ".join(map(str, numbers[:_MOST_SHOWN])) + more
