"""The reward `code`, as far as no program runs: what is taken from a completion, and which tests are read."""

from __future__ import annotations

from typing import Any

import pytest

from forge.errors import DataError, OptionError
from forge.rewards.code import StreamTest, check_code, passes, program_in, read_limits, read_tests
from forge.runtime.sandbox import Outcome
from forge.types import Task


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("no code", None),
        ("```python\na = 1\n```", "a = 1\n"),
        ("```py\na\n```\ntext\n```python3\nb\n```\nend", "b\n"),
        ("```\na\n```", "a\n"),
        ("```python\na\n```\noutput:\n```\n4\n```", "a\n"),
        ("```bash\nrm\n```", None),
        ("```\n4\n```\n```bash\nrm\n```", "4\n"),
        ("~~~python\na\n~~~", "a\n"),
        ("````python\nx = '''\n```\n'''\n````", "x = '''\n```\n'''\n"),
        ("```python\ncut off", "cut off"),
        ("inline ```python is no block```", None),
        ("  ```Python title\na\n  ```", "a\n"),
        ("```python\n```", ""),
    ],
)
def test_the_last_block_of_python_is_taken(text: str, program: str | None) -> None:
    assert program_in(text) == program


def test_a_text_of_fences_takes_no_time() -> None:
    assert program_in("```python\n" * 50_000) is not None
    assert program_in("`" * 500_000) is None


def test_tests_are_statements_or_pairs() -> None:
    prompt = Task("p", metadata={"tests": ["assert f(1)", {"stdin": "1", "stdout": "2"}, {"stdout": "3"}]})
    assert read_tests(prompt, None) == ["assert f(1)", StreamTest("1", "2"), StreamTest("", "3")]
    assert read_tests(prompt, ("assert True",)) == ["assert True"]


@pytest.mark.parametrize("tests", [None, [], "assert f(1)", 3])
def test_a_prompt_without_tests_is_named(tests: Any) -> None:
    with pytest.raises(DataError) as caught:
        read_tests(Task("train.jsonl:3", metadata={"tests": tests}), None)
    assert (caught.value.path, caught.value.value) == ("train.jsonl:3: metadata.tests", tests)
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("test", [3, {}, {"stdin": "1"}, {"stdout": 1}, {"stdout": "1", "input": "2"}])
def test_what_is_no_test_is_named(test: Any) -> None:
    with pytest.raises(OptionError) as caught:
        check_code({"tests": ["assert True", test]})
    assert (caught.value.path, caught.value.value) == ("tests[1]", test)


def test_limits_are_checked() -> None:
    limits = read_limits({"wall_s": 3, "memory_bytes": 64 * 1024**2})
    assert (limits.wall_s, limits.cpu_s, limits.memory_bytes, limits.processes) == (3, 3, 64 * 1024**2, 8)
    for given, path in (({"seconds": 3}, "limits.seconds"), ({"processes": 0}, "limits.processes")):
        with pytest.raises(OptionError) as caught:
            check_code({"limits": given})
        assert (caught.value.path, caught.value.value) == (path, next(iter(given.values())))


def test_outputs_are_compared_by_line() -> None:
    def outcome(stdout: str, **changes: Any) -> Outcome:
        fields = {"exit_code": 0, "timed_out": False, "killed_for": None, "seconds": 0.1} | changes
        return Outcome(stdout, "", **fields)

    test = StreamTest("", "a b\n1")
    assert passes(outcome("a b  \n1\n\n"), test)
    assert not passes(outcome("ab\n1"), test)
    assert not passes(outcome(" a b\n1"), test)
    assert not passes(outcome("a b\n1", exit_code=1), test)
    assert not passes(outcome("a b\n1", killed_for="output"), test)
