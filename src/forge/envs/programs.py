"""Black-box agents: any program that honours `OPENAI_BASE_URL` is an episode.

The program runs in a sandbox without a network. It reaches the endpoint of its own episode, and nothing else. Every
answer that it gets is a turn; a grader or its exit status gives the reward.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Final

from forge.envs.agent import Agent
from forge.envs.endpoint_requests import SamplingRules
from forge.envs.episode import EpisodeProgram
from forge.envs.external.venvs import python_of
from forge.envs.limits import EpisodeOver, Fault
from forge.envs.sandbox import BRIDGED_URL, Files, SandboxLimits, SandboxTools, Snapshot, sandbox
from forge.errors import OptionError
from forge.registry import import_attribute
from forge.runtime.sandbox.box_records import Content, check_command
from forge.types import Task

if TYPE_CHECKING:
    from forge.envs.endpoint import Endpoint

_MIB: Final = 1024**2
_OWN_FOLDER: Final = ".forge"
_TASK_FILE: Final = f"{_OWN_FOLDER}/task.json"
_DEFAULT_LIMITS: Final = {"memory_bytes": 1024 * _MIB, "processes": 64}
_SPARE_S: Final = 600.0
_SHOWN: Final = 2000

Grader = Callable[[Task, "ProgramRun"], Awaitable[float | Mapping[str, float]] | float | Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSettings:
    """How a program is run as an agent.

    Attributes:
        command: the program and its arguments. In each, `{prompt}` stands for the last message of the user, `{task}`
            for the path of a JSON file with the task, `{base_url}` and `{api_key}` for the endpoint's.
        stdin: what it reads on standard input; the same words stand for the same.
        files: files of its work folder, by path.
        folder: a folder whose files are copied into the work folder first.
        files_key: the key of the task's metadata that holds further files.
        task_keys: what the JSON file says besides `id` and `messages`: keys of the metadata, or `answer`.
        environ: further environment variables.
        python: the interpreter that `python` and `python3` are, with its packages; a virtual environment's, say.
        requirements: packages that pip installs, once per machine, into a virtual environment of their own, whose
            interpreter is used. Instead of `python`.
        readable: further paths of this machine that it can read.
        isolation: see `forge.sandbox`.
        timeout_s: seconds that it may run, answers of the policy included; then it is killed.
        limits: other limits of the sandbox, see `SandboxLimits`.
        allow, ignore: see `Agent.endpoint`.
    """

    command: Sequence[str]
    stdin: str = ""
    files: Mapping[str, Content] = field(default_factory=dict)
    folder: str | None = None
    files_key: str | None = None
    task_keys: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    requirements: Sequence[str] = ()
    readable: Sequence[str] = ()
    isolation: str = "auto"
    timeout_s: float = 600.0
    limits: Mapping[str, Any] = field(default_factory=dict)
    allow: Sequence[str] = ()
    ignore: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.command, str):
            raise OptionError(
                "the command of a program is one text",
                path="episode.args.command",
                value=self.command,
                rule="a list of words: no shell reads them",
                repair=f"{['bash', '-c', self.command]}",
            )
        check_command(self.command, self.environ)
        if self.folder is not None and not os.path.isdir(self.folder):
            raise OptionError(
                "there is no such folder",
                path="episode.args.folder",
                value=self.folder,
                rule="a folder, relative to the working directory",
                repair="give its absolute path",
            )
        if self.python is not None and self.requirements:
            raise OptionError(
                "a program has one interpreter",
                path="episode.args",
                value={"python": self.python, "requirements": list(self.requirements)},
                rule="python or requirements",
                repair="install the packages into that interpreter's environment, or leave `python` out",
            )
        SamplingRules.of({}, allow=self.allow, ignore=self.ignore)
        self.sandbox_limits()

    def sandbox_limits(self) -> SandboxLimits:
        """Return the limits of the sandbox, or raise `OptionError`."""
        known = {each.name for each in fields(SandboxLimits)} - {"wall_s", "open_s"}
        unknown = sorted(set(self.limits) - known)
        if unknown:
            raise OptionError(
                "these are not limits of a program",
                path="episode.args.limits",
                value=unknown,
                rule=f"names among {', '.join(sorted(known))}",
                repair="use timeout_s for the time that the program may run",
            )
        own = {**_DEFAULT_LIMITS, "cpu_s": self.timeout_s, **self.limits}
        return SandboxLimits(wall_s=self.timeout_s, open_s=self.timeout_s + _SPARE_S, **own)


@dataclass(frozen=True, slots=True)
class ProgramRun:
    """How a program ended, for its grader.

    Attributes:
        stdout, stderr: what it wrote; where that is more than the limit `output_bytes`, without the middle.
        exit_code: its exit code; negative for a signal, None if it was killed because its time was over.
        timed_out: whether its time was over.
        seconds: how long it ran.
        files: the files of its work folder when it had ended.
        num_turns: the answers of the policy that it got.
    """

    stdout: str
    stderr: str
    exit_code: int | None
    timed_out: bool
    seconds: float
    files: Files
    num_turns: int


async def run_black_box(task: Task, agent: Agent, settings: ProgramSettings) -> ProgramRun:
    """Run a program as the agent of an episode, and return how it ended.

    What the program does is a result, whatever it is. `Fault` is raised for what is not the policy's doing: the policy
    failed, the sandbox or its connection did, or the program failed before the policy had answered it once.
    """
    python = settings.python
    if settings.requirements:
        python = str(await asyncio.to_thread(python_of, settings.requirements))
    async with agent.endpoint(allow=settings.allow, ignore=settings.ignore) as endpoint:
        async with sandbox(
            limits=settings.sandbox_limits(),
            isolation=settings.isolation,
            python=python,
            readable=settings.readable,
            endpoint=endpoint,
        ) as box:
            await _put_files(box, task, settings)
            words = _words(task, box, endpoint)
            environ = {"FORGE_TASK": words["task"], "USER": "agent", **settings.environ}
            try:
                result = await box.run(
                    [_filled(word, words) for word in settings.command],
                    stdin=_filled(settings.stdin, words),
                    environ={name: _filled(value, words) for name, value in environ.items()},
                )
            except OSError as error:
                raise Fault(f"the program cannot be started: {error}", kind="program_start") from error
            found = await box.files()
        num_turns = sum(turn.is_delivered for turn in endpoint.turns)
        if result.exit_code != 0 and num_turns == 0 and not endpoint.has_failed:
            raise _early_end(result.exit_code, result.stderr or result.stdout, endpoint)
    files = Files(
        {path: content for path, content in found.items() if not path.startswith(f"{_OWN_FOLDER}/")},
        left_out=found.left_out,
    )
    return ProgramRun(
        result.stdout, result.stderr, result.exit_code, result.timed_out, result.seconds, files, num_turns
    )


def _early_end(exit_code: int | None, output: str, endpoint: Endpoint) -> Fault:
    """Return the fault of a program that failed before the policy had any part in it."""
    how = "did not end in time" if exit_code is None else f"ended with exit code {exit_code}"
    refused = "" if endpoint.last_refusal is None else f"; the endpoint refused its request: {endpoint.last_refusal}"
    shown = output.strip()[-_SHOWN:] or "no output"
    return Fault(f"the program {how} before the policy answered it{refused}\n{shown}", kind="program_start")


async def _put_files(box: SandboxTools, task: Task, settings: ProgramSettings) -> None:
    if settings.folder is not None:
        await box.put(await asyncio.to_thread(read_folder, settings.folder))
    given = task.metadata.get(settings.files_key, {}) if settings.files_key is not None else {}
    await box.put({**settings.files, **given, _TASK_FILE: _task_file(task, settings.task_keys)})


def _task_file(task: Task, keys: Sequence[str]) -> str:
    """Return what the program is told about its task. The answer, and what graders need, stay here unless asked for."""
    values = {**task.metadata, "answer": task.answer}
    told = {"id": task.id, "messages": list(task.messages), **({} if task.text is None else {"text": task.text})}
    for key in keys:
        if key not in values:
            raise OptionError(
                "the task has no such key",
                path="episode.args.task_keys",
                value=key,
                rule=f"`answer`, or a key of the task's metadata: {', '.join(sorted(task.metadata)) or 'it has none'}",
                repair="leave it out, or add it to the source of tasks",
            )
        told[key] = values[key]
    return json.dumps(told, ensure_ascii=False, indent=1)


def _words(task: Task, box: SandboxTools, endpoint: Endpoint) -> dict[str, str]:
    asked = [message for message in task.messages if message.get("role") == "user"]
    prompt = task.text or (str(asked[-1].get("content") or "") if asked else "")
    return {
        "prompt": prompt.replace("\0", ""),  # no argument can hold one
        "task": os.path.join(box.work, _TASK_FILE),
        "base_url": BRIDGED_URL,
        "api_key": endpoint.api_key,
    }


def _filled(text: str, words: Mapping[str, str]) -> str:
    """Return a text with the words of `words` in place of their names in braces. Other braces stay."""
    return re.sub(r"\{(prompt|task|base_url|api_key)\}", lambda found: words[found[1]], text)


def read_folder(path: str) -> Snapshot:
    """Return the files below a folder, with their modes. Links and what is not a file are left out."""
    entries, data = [], []
    for parent, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            place = os.path.join(parent, name)
            if os.path.islink(place) or not os.path.isfile(place):
                continue
            with open(place, "rb") as file:
                content = file.read()
            mode = 0o755 if os.access(place, os.X_OK) else 0o644
            entries.append((os.path.relpath(place, path), "file", mode, len(content)))
            data.append(content)
    return Snapshot(tuple(entries), b"".join(data))


# ---- The episode -----------------------------------------------------------------------------------------------------


async def _run_program(task: Task, agent: Agent, *, grader: str | Grader | None = None, **settings: Any) -> None:
    chosen, grade = ProgramSettings(**settings), find_grader(grader)
    run = await run_black_box(task, agent, chosen)
    earned = grade(task, run)
    if inspect.isawaitable(earned):
        earned = await earned
    for name, value in (earned if isinstance(earned, Mapping) else {"reward": earned}).items():
        agent.add_reward(value, name=name)
    if run.timed_out:
        raise EpisodeOver("time_limit", f"{chosen.timeout_s:g} s")


def exit_status(task: Task, run: ProgramRun) -> float:
    """Return 1 for a program that ended with exit code 0, and 0 for every other ending."""
    return float(run.exit_code == 0)


def find_grader(grader: str | Grader | None) -> Grader:
    """Return the function that scores a program; None is the exit status, a text is `module:attribute`."""
    if grader is None:
        return exit_status
    found = import_attribute(grader, path="episode.args.grader") if isinstance(grader, str) else grader
    if not callable(found):
        raise OptionError(
            "this is not a grader",
            path="episode.args.grader",
            value=grader,
            rule="a function (task, run) that returns a number, or numbers by name; it may be a coroutine function",
            repair="leave it out for the exit status",
        )
    checked: Grader = found
    return checked


class _ProgramEpisode(EpisodeProgram):
    """The episode of a program, whose arguments are checked before a run starts."""

    def with_args(self, args: Mapping[str, Any]) -> EpisodeProgram:
        merged = {**self.args, **args}
        known = {"grader", *(each.name for each in fields(ProgramSettings))}
        unknown = sorted(set(merged) - known)
        if unknown or "command" not in merged:
            raise OptionError(
                f"the episode {self.name} does not take these arguments",
                path="episode.args",
                value=unknown or sorted(merged),
                rule=f"`command`, and any of {', '.join(sorted(known - {'command'}))}",
                repair="correct episode.args",
            )
        find_grader(merged.get("grader"))
        ProgramSettings(**{name: value for name, value in merged.items() if name != "grader"})
        return super().with_args(args)


run_program: EpisodeProgram = _ProgramEpisode(_run_program, "run_program")
"""The episode `kind: program`. Its arguments are `grader` and those of `ProgramSettings`."""


def program_episode(command: Sequence[str], *, grader: str | Grader | None = None, **settings: Any) -> EpisodeProgram:
    """Return an episode whose agent is a program.

    Args:
        command: the program and its arguments.
        grader: a function (task, run) that returns the reward, or several by name; `module:attribute` of one; None for
            1 where the exit code is 0, else 0.
        settings: see `ProgramSettings`.

    Example:
        >>> solve = program_episode(["python3", "agent.py", "{prompt}"], folder="my_agent", timeout_s=120)
    """
    return run_program.with_args({"command": command, "grader": grader, **settings})
