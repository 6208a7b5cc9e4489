"""Settings that may change while a run runs: checked, recorded, and made again at the same steps by a resume."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from forge.config.base import ConfigModel
from forge.config.changing import with_values
from forge.config.fields import field_at
from forge.config.problems import InvalidConfig
from forge.errors import ConfigError, OptionError, did_you_mean
from forge.loops.runtime_changes import (
    FILE_NAME,
    RuntimeChange,
    begin_changes,
    changes_in_force,
    read_changes,
    record_changes,
    value_at,
)

_log = logging.getLogger("forge.loops")
C = TypeVar("C", bound=ConfigModel)

LEARNING_RATE: Final = "training.learning_rate"
CRITIC_LEARNING_RATE: Final = "critic.training.learning_rate"
TEMPERATURE: Final = "generator.sampling.temperature"
STALENESS: Final = "rollout.staleness"
BATCH_GROUPS: Final = "rollout.batch_groups"
LIVE_KEYS: Final[Mapping[str, str]] = {
    LEARNING_RATE: "the highest rate of the schedule",
    CRITIC_LEARNING_RATE: "the same of the critic; null for the policy's",
    TEMPERATURE: "of the groups that begin from then on",
    STALENESS: "the bound for the next batch, and for the groups that begin",
    BATCH_GROUPS: "groups of the next batch",
}
"""The keys that can be changed while a run runs, with what they mean then."""
BY_CONFIGURATION: Final = "configuration"
"""What changed a value that a resumed run's configuration gives anew."""


class LiveSettings(Generic[C]):
    """The values in force of a run's settings. Changes are made between two steps.

    Args:
        config: the run's configuration, without what was changed while it ran.
        folder: the run's folder, in which changes are recorded.
        keys: which of `LIVE_KEYS` this run has.
        check: refuses configurations that the schema accepts and this run cannot take on while it runs.
    """

    def __init__(
        self, config: C, folder: Path, *, keys: Sequence[str], check: Callable[[C], None] = lambda config: None
    ) -> None:
        self._configured, self._folder, self._keys, self._check = config, folder, tuple(keys), check
        self._planned: list[RuntimeChange] = []
        self.config = config
        """The configuration with the values in force."""
        self.repeated: frozenset[str] = frozenset()
        """The keys whose values a resumed run took from recorded changes."""

    @property
    def values(self) -> dict[str, Any]:
        """The values in force by key."""
        return {key: value_at(self.config, key) for key in self._keys}

    @property
    def configured(self) -> dict[str, Any]:
        """What the configuration says, by key."""
        return {key: value_at(self._configured, key) for key in self._keys}

    @property
    def planned(self) -> tuple[RuntimeChange, ...]:
        """Changes of steps to come, which were made before the run was resumed from an earlier one."""
        return tuple(self._planned)

    def begin(self, step: int, *, is_resumed: bool, saved: Mapping[str, Any] | None = None) -> None:
        """Take on the values that held when `step` steps were taken, and plan the changes of later ones.

        `saved` are the values in force that the checkpoint knows. Where the configuration gives another one than these,
        or than was recorded, that is recorded as a change, too: so the file says which value held in each step.
        """
        begin_changes(self._folder, is_resumed=is_resumed)
        recorded = list(read_changes(self._folder))
        found = [
            change
            for key, configured in self.configured.items()
            for change in changes_in_force(recorded, key, configured=configured)
        ]
        self.repeated = frozenset(change.key for change in found if change.step <= step)
        self._adopt([change for change in found if change.step <= step])
        self._planned = sorted((change for change in found if change.step > step), key=lambda change: change.step)
        self._check_planned()
        self._note_configuration(step, recorded, saved or {})

    def _adopt(self, changes: Sequence[RuntimeChange]) -> None:
        """Make recorded changes again."""
        self.config = self._with(self.config, changes)
        for each in changes:
            _log.info("%s is %r, as changed after step %d by %s", each.key, each.after, each.step, each.by)

    def _with(self, config: C, changes: Sequence[RuntimeChange]) -> C:
        if not changes:
            return config
        try:
            changed = with_values(config, {change.key: change.after for change in changes})
            self._check(changed)
        except ConfigError as error:
            keys = ", ".join(sorted({change.key for change in changes}))
            raise ConfigError(
                f"what was changed while the run ran does not fit its configuration now: {error.message}",
                path=str(self._folder / FILE_NAME),
                value=keys,
                rule=error.rule,
                repair=f"give another value of {keys} in the configuration, or take back what else was changed in it",
            ) from error
        return changed

    def _check_planned(self) -> None:
        """Refuse, before anything is trained, what could not be changed again at its step."""
        config = self.config
        for step in sorted({change.step for change in self._planned}):
            config = self._with(config, [change for change in self._planned if change.step == step])
        for each in self._planned:
            _log.info("%s will be %r after step %d, as changed then by %s", each.key, each.after, each.step, each.by)

    def _note_configuration(self, step: int, recorded: Sequence[RuntimeChange], saved: Mapping[str, Any]) -> None:
        """Record where the configuration gives another value than the file says for the steps to come."""
        changes = []
        for key, now in self.values.items():
            known = changes_in_force(recorded, key)
            first = known[0].before if known else saved.get(key, now)
            before = next((change.after for change in reversed(known) if change.step <= step), first)
            later = [change for change in known if change.step > step]
            if before != now or later != [change for change in self._planned if change.key == key]:
                configured = value_at(self._configured, key)
                changes.append(RuntimeChange(step, key, configured, before, now, BY_CONFIGURATION))
        if changes:
            record_changes(self._folder, changes)

    # ---- Changes ----------------------------------------------------------------------------------------------------

    def checked(self, values: Mapping[str, Any]) -> C:
        """Return the configuration with other values. Raise for a key that cannot be changed, and for values that break
        a rule of the schema or of this run."""
        for key in values:
            if key not in self._keys:
                raise OptionError(
                    "this key cannot be changed while the run runs",
                    path=key,
                    value=values[key],
                    rule=f"one of {', '.join(self._keys)}",
                    repair=self._other_way(key),
                )
        try:
            changed = with_values(self.config, values)
        except InvalidConfig as error:
            if len(error.problems) > 1:
                raise
            fields = {"path": error.path, "value": error.value, "rule": error.rule, "repair": error.repair}
            raise ConfigError("the run refuses this value", **fields) from None  # type: ignore[arg-type]
        self._check(changed)
        return changed

    def _other_way(self, key: str) -> str:
        is_known = field_at(type(self.config), key.split(".")) is not None
        near = None if is_known else did_you_mean(key, self._keys)
        return near or "stop the run, change its configuration, and continue it with --resume"

    def set(self, values: Mapping[str, Any], *, step: int, by: str) -> list[RuntimeChange]:
        """Change values after `step` steps: all of them, or none. Returns the changes, which are recorded."""
        changed = self.checked(values)
        planned = {change.key for change in self._planned}
        changes = [
            RuntimeChange(step, key, value_at(self._configured, key), value_at(self.config, key), after, by)
            for key in values
            if (after := value_at(changed, key)) != value_at(self.config, key) or key in planned
        ]
        if changes:
            record_changes(self._folder, changes)
        self.config = changed
        self._planned = [change for change in self._planned if change.key not in values]
        for each in changes:
            _log.info("%s: %r -> %r from step %d on, by %s", each.key, each.before, each.after, step + 1, by)
        return changes

    def advance(self, step: int) -> bool:
        """Make the changes again that were made after this step before the run was resumed. Returns whether there are
        any."""
        due = [change for change in self._planned if change.step <= step]
        self._planned = [change for change in self._planned if change.step > step]
        self._adopt(due)
        return bool(due)
