"""Commands on a live run that are carried out between two of its steps, whatever kind of run it is.

`show` and `stop` are answered at once. `set`, `evaluate` and `save` wait for the end of the step in progress, and are
answered when they are done; `profile` waits for the end of the step after it.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from forge.errors import ForgeError, OptionError
from forge.loops.live_settings import LIVE_KEYS, LiveSettings
from forge.loops.run_control import Handler, RunRefused
from forge.loops.stopping import Stop

_log = logging.getLogger("forge.loops")
DEFAULT_BY: Final = "forge control"
Action = Callable[[], Awaitable[Mapping[str, Any]]]


@dataclass(frozen=True, slots=True)
class _Asked:
    request: Mapping[str, Any]
    answer: asyncio.Future[Mapping[str, Any]]


class StepCommands:
    """The commands `show`, `stop`, `set`, `evaluate`, `save` and `profile` of one run. All calls are made on the loop's
    thread.

    Args:
        settings: what `set` changes.
        stop: what `stop` asks.
        step: returns the steps taken so far.
        describe: returns what `show` says besides.
        refuse_evaluation: raises where the run has nothing to evaluate on.
    """

    def __init__(
        self,
        settings: LiveSettings[Any],
        *,
        stop: Stop,
        step: Callable[[], int],
        describe: Callable[[], Mapping[str, Any]],
        refuse_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._stop, self._step, self._describe = settings, stop, step, describe
        self._refuse_evaluation = refuse_evaluation
        self._waiting: dict[str, list[_Asked]] = {"set": [], "evaluate": [], "save": [], "profile": []}
        self._end: ForgeError | None = None

    @property
    def handlers(self) -> Mapping[str, Handler]:
        """What answers each command."""
        return {
            "show": self._show,
            "stop": self._ask_to_stop,
            "set": self._ask_to_set,
            "evaluate": self._ask_to_evaluate,
            "save": self._ask_to_save,
            "profile": self._ask_to_profile,
        }

    # ---- Requests ---------------------------------------------------------------------------------------------------

    async def _show(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        configured = self._settings.configured
        settings = {
            key: {"value": value, "configured": configured[key], "meaning": LIVE_KEYS[key]}
            for key, value in self._settings.values.items()
        }
        planned = [
            {"from_step": change.step + 1, "key": change.key, "after": change.after}
            for change in self._settings.planned
        ]
        waiting = {name: len(asked) for name, asked in self._waiting.items() if asked}
        facts = {"settings": settings, "planned": planned, "commands": waiting, "is_stopping": self._stop.is_asked}
        return {"step": self._step(), **facts, **self._describe()}

    async def _ask_to_stop(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if not self._stop.is_asked:
            _log.warning("stopping on command: this step is finished and saved; press Ctrl-C to end at once")
        self._stop.ask(signal.SIGINT)
        return {"step": self._step(), "exit_code": self._stop.exit_code}

    async def _ask_to_set(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        values = request.get("values")
        if not isinstance(values, dict) or not values:
            raise OptionError(
                "a command that changes settings names at least one",
                path="values",
                value=values,
                rule="keys with their new values",
                repair="forge control RUN set training.learning_rate=1e-5",
            )
        self._settings.checked(values)  # refused at once; and again when it is carried out, after others
        return await self._between_steps("set", request)

    async def _ask_to_evaluate(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        self._refuse_evaluation()
        return await self._between_steps("evaluate", request)

    async def _ask_to_save(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._between_steps("save", request)

    async def _ask_to_profile(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        return await self._between_steps("profile", request)

    async def _between_steps(self, name: str, request: Mapping[str, Any]) -> Mapping[str, Any]:
        if self._end is not None:
            raise self._end
        asked = _Asked(request, asyncio.get_running_loop().create_future())
        self._waiting[name].append(asked)
        return await asked.answer

    # ---- Between two steps ------------------------------------------------------------------------------------------

    def is_waiting(self, name: str) -> bool:
        """Whether a command waits to be carried out."""
        return bool(self._waiting[name])

    def change(self) -> bool:
        """Change the settings as commands ask, and as is planned for this step. Returns whether any is to change."""
        step, has_changed = self._step(), self._settings.advance(self._step())
        for asked in self._take("set"):
            by = asked.request.get("by")
            try:
                changes = self._settings.set(
                    asked.request["values"], step=step, by=by if isinstance(by, str) and by else DEFAULT_BY
                )
            except ForgeError as error:
                _refuse(asked, error)
                continue
            has_changed = has_changed or bool(changes)
            plain = [{"key": each.key, "before": each.before, "after": each.after} for each in changes]
            _answer(asked, {"step": step, "from_step": step + 1, "changes": plain})
        return has_changed

    async def carry_out(self, name: str, action: Action) -> None:
        """Do what commands of a name ask for, once for all of them, if there are any."""
        waiting = self._take(name)
        if not waiting:
            return
        try:
            found = {"step": self._step(), **await action()}
        except BaseException as error:
            for asked in waiting:
                _refuse(asked, error if isinstance(error, ForgeError) else _ended(f"{name}: {error!r}"))
            raise
        for asked in waiting:
            _answer(asked, found)

    def _take(self, name: str) -> list[_Asked]:
        taken, self._waiting[name] = self._waiting[name], []
        return taken

    def end(self, why: str = "the run ended") -> None:
        """Refuse what waits, and whatever comes: there is no next step."""
        self._end = _ended(why)
        for name in self._waiting:
            for asked in self._take(name):
                _refuse(asked, self._end)


def _ended(why: str) -> RunRefused:
    return RunRefused(
        f"{why} before this command was carried out",
        rule="commands are carried out between two steps",
        repair="resume the run, and give the command again",
    )


def _answer(asked: _Asked, found: Mapping[str, Any]) -> None:
    if not asked.answer.done():  # cancelled, when the run ends its connections
        asked.answer.set_result(found)


def _refuse(asked: _Asked, error: ForgeError) -> None:
    if not asked.answer.done():
        asked.answer.set_exception(error)
