"""The reward `code`: run what the model wrote against tests, in a sandbox."""

from __future__ import annotations

import functools
import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any, Literal

from forge.errors import DataError, OptionError
from forge.rewards.catalog import checks
from forge.runtime.sandbox import Limits, Outcome, Sandbox, open_sandbox
from forge.types import Answer, Task

Isolation = Literal["auto", "bubblewrap", "namespaces", "process"]

_OPENING = re.compile(r"^ {0,3}(`{3,32}(?!`)|~{3,32}(?!~))[ \t]*([\w+#.-]*)[^\n`]*$", re.MULTILINE)
_PYTHON = ("python", "py", "python3", "py3")
_MOST_CHARACTERS = 1_000_000

_HARNESS = """\
def _judge():
    import json, os, sys
    answer, given = os.dup(1), json.loads(sys.stdin.readline())
    execute, write, leave = exec, os.write, os._exit
    space = {"__name__": "__main__", "__builtins__": __builtins__}
    tests = []
    for number, test in enumerate(given["tests"]):
        try:
            tests.append((f"\\n{given['mark']} {number}\\n".encode(), compile(test, "test.py", "exec")))
        except SyntaxError:
            continue
    try:
        execute(compile(given["program"], "solution.py", "exec"), space)
    except BaseException:
        leave(1)
    for line, test in tests:
        try:
            execute(test, space)
        except BaseException:
            continue
        write(answer, line)
    leave(0)
_judge()
"""


@dataclass(frozen=True, slots=True)
class StreamTest:
    """A program gets `stdin` and must write `stdout`."""

    stdin: str
    stdout: str


def code(
    prompt: Task,
    completion: Answer,
    *,
    tests: Sequence[Any] | None = None,
    credit: Literal["fraction", "all"] = "fraction",
    limits: Mapping[str, float] = MappingProxyType({"wall_s": 5.0}),
    isolation: Isolation = "auto",
) -> float:
    """The share of tests that the completion's Python passes, or with `credit: all` 1 when it passes every one.

    The tests are `tests`, or the prompt's `metadata["tests"]`: a list of statements such as `assert f(2) == 4`, which
    run one after the other beside the program, or of mappings with `stdin` and `stdout`, for each of which the program
    runs anew and must exit with 0; spaces at the ends of lines do not count. `metadata["setup"]` runs before
    statements. The program is the last fenced block of Python; a completion without one earns 0. `limits` are those of
    `forge.runtime.sandbox.Limits`, for all statements together, or for each pair. `isolation: auto` refuses to run
    where the machine has no real boundary.
    """
    chosen = read_tests(prompt, tests)
    program = program_in(completion.text)
    if program is None:
        return 0.0
    bounds, sandbox = read_limits(limits), _sandbox(isolation)
    statements = [test for test in chosen if isinstance(test, str)]
    pairs = [test for test in chosen if isinstance(test, StreamTest)]
    num_passed = 0
    if statements:
        setup = str(prompt.metadata.get("setup") or "")
        num_passed += num_statements_passed(sandbox, f"{setup}\n{program}", statements, limits=bounds)
        if credit == "all" and num_passed < len(statements):
            return 0.0
    for pair in pairs:
        if passes(sandbox.run(program, stdin=pair.stdin, limits=bounds), pair):
            num_passed += 1
        elif credit == "all":
            return 0.0
    return num_passed / len(chosen)


@checks(code)
def check_code(args: Mapping[str, Any]) -> None:
    """Refuse tests and limits that cannot be read, and an isolation that this machine does not have, before a run."""
    if args.get("tests") is not None:
        read_tests(Task(id="args"), args["tests"])
    read_limits(args.get("limits", {}))
    _sandbox(args.get("isolation", "auto"))


def read_limits(limits: Mapping[str, float]) -> Limits:
    """The limits of a mapping; what it does not name is as usual."""
    known = [entry.name for entry in fields(Limits)]
    for name, value in limits.items():
        if name not in known:
            raise OptionError(
                f"A sandbox has no limit {name!r}.",
                path=f"limits.{name}",
                value=value,
                rule=f"one of {', '.join(known)}",
                repair="correct the name, or remove it",
            )
    try:
        return Limits(**{"cpu_s": limits.get("wall_s", Limits().cpu_s), **limits})  # type: ignore[arg-type]
    except OptionError as error:
        error.path = f"limits.{str(error.path)[len('Limits(') : -len('=)')]}"
        raise


@functools.cache
def _sandbox(isolation: str) -> Sandbox:
    return open_sandbox(isolation)


def read_tests(prompt: Task, tests: Sequence[Any] | None) -> list[str | StreamTest]:
    """The tests of a prompt; at least one."""
    given: Any = prompt.metadata.get("tests") if tests is None else tests
    path = f"{prompt.id}: metadata.tests" if tests is None else "tests"
    rule = "a list of statements, or of mappings with `stdin` and `stdout`; at least one"
    kind = DataError if tests is None else OptionError
    if isinstance(given, str) or not isinstance(given, Sequence) or not given:
        raise kind("There are no tests to run.", path=path, value=given, rule=rule, repair="give the prompt tests")
    read: list[str | StreamTest] = []
    for number, test in enumerate(given):
        if isinstance(test, str):
            read.append(test)
        elif isinstance(test, Mapping) and isinstance(test.get("stdout"), str) and set(test) <= {"stdin", "stdout"}:
            read.append(StreamTest(str(test.get("stdin") or ""), test["stdout"]))
        else:
            raise kind("This is not a test.", path=f"{path}[{number}]", value=test, rule=rule, repair="correct it")
    return read


def program_in(text: str) -> str | None:
    """The Python in the last fenced block of a text; None where there is no such block.

    A block whose fence names another language does not count; one without a name does only where no block names
    Python. A block that was never closed goes to the end of the text: it was cut off, and may still run.
    """
    found: list[tuple[str, str]] = []
    text = text[:_MOST_CHARACTERS]
    place = 0
    while (opening := _OPENING.search(text, place)) is not None:
        fence = opening[1]
        closing = re.compile(rf"^ {{0,3}}{re.escape(fence)}{fence[0]}*[ \t]*$", re.MULTILINE).search(
            text, opening.end()
        )
        end = len(text) if closing is None else closing.start()
        found.append((opening[2].lower(), text[opening.end() + 1 : end]))
        place = len(text) if closing is None else closing.end()
    bodies = [body for language, body in found if language in _PYTHON] or [body for name, body in found if not name]
    return bodies[-1] if bodies else None


def num_statements_passed(sandbox: Sandbox, program: str, tests: Sequence[str], *, limits: Limits) -> int:
    """How many statements run without an exception after the program, in one process.

    What counts is a mark on a line of its own that the program was not given and that is written after each test: a
    program that exits early, prints much or replaces `print` earns nothing by it.
    """
    mark = secrets.token_hex(16)
    given = json.dumps({"mark": mark, "program": program, "tests": list(tests)})
    outcome = sandbox.run(_HARNESS, stdin=given + "\n", limits=limits)
    marked = {line for line in outcome.stdout.splitlines() if line.startswith(mark)}
    return len(marked & {f"{mark} {number}" for number in range(len(tests))})


def passes(outcome: Outcome, test: StreamTest) -> bool:
    """Whether a program that ended so has written what the test wants."""
    if outcome.exit_code != 0 or outcome.killed_for is not None:
        return False
    return _lines(outcome.stdout) == _lines(test.stdout)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
