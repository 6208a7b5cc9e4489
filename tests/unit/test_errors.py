"""What a program may rely on in every error: the four fields, the text, and the way to another process."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import cloudpickle
import pytest

from forge import errors
from forge.errors import (
    MISSING,
    ActorFailure,
    CallTimeout,
    ConfigError,
    DownloadError,
    FanoutError,
    ForgeError,
    LaunchError,
    OptionError,
    Overloaded,
    PlacementError,
    RemoteError,
    ServiceStopped,
)

HIERARCHY = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]


def example(cls: type[ForgeError]) -> ForgeError:
    if cls is RemoteError:
        return RemoteError("far away", type_name="app.Broken")
    if cls is FanoutError:
        return FanoutError("one failed", outcomes=[1, 2])
    return cls("it failed", path="run.seed", value=-1, rule="seed >= 0", repair="seed=0")


def test_the_text_says_path_value_rule_and_repair() -> None:
    error = ForgeError("it failed", path="run.seed", value=-1, rule="seed >= 0", repair="seed=0")
    assert str(error).splitlines() == [
        "it failed",
        "  path:   run.seed",
        "  value:  -1",
        "  rule:   seed >= 0",
        "  repair: seed=0",
    ]


def test_what_was_not_given_is_not_said() -> None:
    error = ForgeError("it failed")
    assert str(error) == "it failed"
    assert (error.path, error.rule, error.repair) == (None, None, None)
    assert error.value is MISSING


def test_none_is_a_value() -> None:
    assert "value:  None" in str(ForgeError("it failed", value=None))


def test_a_long_value_is_cut() -> None:
    error = ForgeError("it failed", value="x" * 1000)
    assert len(str(error)) < 300
    assert str(error).endswith("…")
    assert error.value == "x" * 1000


@pytest.mark.parametrize("copied", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
@pytest.mark.parametrize("cls", HIERARCHY)
def test_every_error_crosses_processes_whole(cls: type[ForgeError], copied: Callable[[ForgeError], ForgeError]) -> None:
    error = example(cls)
    error.add_note("seen on rank 3")
    there = copied(error)
    assert type(there) is cls
    assert str(there) == str(error)
    assert there.args == error.args
    assert vars(there) == vars(error)
    assert there.__notes__ == ["seen on rank 3"]


def test_a_subclass_with_a_constructor_of_its_own_crosses_too() -> None:
    class Stricter(ConfigError):
        def __init__(self, *, line: int) -> None:
            super().__init__(f"line {line} is wrong", value=line)
            self.line = line

    there = pickle.loads(cloudpickle.dumps(Stricter(line=7)))
    assert (there.line, str(there)) == (7, str(Stricter(line=7)))


def test_the_missing_value_stays_itself_in_another_process() -> None:
    assert pickle.loads(pickle.dumps(MISSING)) is MISSING
    assert pickle.loads(pickle.dumps(ForgeError("it failed"))).value is MISSING
    assert repr(MISSING) == "<missing>"


@pytest.mark.parametrize(
    ("cls", "built_in"),
    [
        (ConfigError, ValueError),
        (OptionError, ValueError),
        (PlacementError, RuntimeError),
        (LaunchError, RuntimeError),
        (DownloadError, RuntimeError),
        (RemoteError, RuntimeError),
        (ActorFailure, RuntimeError),
        (CallTimeout, TimeoutError),
        (Overloaded, RuntimeError),
        (ServiceStopped, RuntimeError),
        (FanoutError, RuntimeError),
    ],
)
def test_each_error_is_also_the_built_in_one_that_a_caller_would_catch(
    cls: type[ForgeError], built_in: type[Exception]
) -> None:
    assert issubclass(cls, ForgeError)
    assert issubclass(cls, built_in)


def test_the_outcomes_of_a_fanout_cannot_be_changed() -> None:
    outcomes = [1, 2]
    error = FanoutError("one failed", outcomes=outcomes)
    outcomes.clear()
    assert error.outcomes == (1, 2)
