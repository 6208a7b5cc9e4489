"""What may be an endpoint, what is declared about it, and what is refused."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from forge.errors import OptionError
from forge.runtime.endpoints import Batch, endpoint, specs_of


class Base:
    @endpoint
    async def ask(self, question: str) -> str:
        """Answers."""
        return question

    @endpoint(retry=True)
    def compute(self) -> int:
        return 1

    @endpoint(concurrent=True, batch=4)
    async def score(self, items: list[int]) -> list[int]:
        return items

    async def private(self) -> None: ...


class Derived(Base):
    @endpoint(batch=Batch(size=2, wait_s=0.5))
    async def ask(self, question: str) -> str:
        return question * 2

    compute = None  # type: ignore[assignment]


def test_a_class_declares_what_it_marked() -> None:
    specs = specs_of(Base)
    assert sorted(specs) == ["ask", "compute", "score"]
    declared = {
        name: (spec.name, spec.is_async, spec.retry, spec.concurrent, spec.batch) for name, spec in specs.items()
    }
    assert declared == {
        "ask": ("ask", True, False, False, None),
        "compute": ("compute", False, True, False, None),
        "score": ("score", True, False, True, Batch(4)),
    }


def test_a_subclass_may_replace_and_withdraw_endpoints() -> None:
    specs = specs_of(Derived)
    assert sorted(specs) == ["ask", "score"]
    assert specs["ask"].batch == Batch(2, 0.5)
    assert specs_of(Base)["ask"].batch is None


def test_the_method_itself_stays_as_it_was_written() -> None:
    spec = specs_of(Base)["compute"]
    assert spec.method(Base()) == 1
    assert Base.__dict__["ask"].__doc__ == "Answers."


def test_monarch_sees_the_port_between_self_and_the_arguments() -> None:
    class Typed:
        @endpoint
        async def plain(self, left: int, *, right: int = 1) -> int:
            return left + right

        @endpoint
        async def strict(self, left: int, /) -> int:
            return left

    def parameters(name: str) -> list[inspect.Parameter]:
        return list(inspect.signature(Typed.__dict__[name]._method).parameters.values())

    assert [parameter.name for parameter in parameters("plain")] == ["self", "_forge_port", "left", "right"]
    assert [parameter.kind for parameter in parameters("strict")][1:] == [inspect.Parameter.POSITIONAL_ONLY] * 2


def generates(self: Any) -> Any:
    yield self


def no_self() -> None: ...


def plain(self: Any) -> None: ...


@pytest.mark.parametrize("method", [generates, property(plain), staticmethod(plain), Base, 3])
def test_what_is_no_method_is_refused(method: Any) -> None:
    with pytest.raises(OptionError, match="must be a plain method or an async method") as caught:
        endpoint(method)
    error = caught.value
    assert error.value is method
    assert error.path
    assert error.rule
    assert error.repair


def test_an_endpoint_takes_self() -> None:
    with pytest.raises(OptionError, match="must take self") as caught:
        endpoint(no_self)
    assert (caught.value.path, caught.value.repair) == ("no_self", "add `self`")
    assert caught.value.rule


def test_a_plain_method_cannot_be_concurrent() -> None:
    with pytest.raises(OptionError, match="must be async") as caught:
        endpoint(concurrent=True)(plain)
    assert (caught.value.path, caught.value.value) == ("plain", "def")
    assert caught.value.rule == "concurrent=True needs async def"
    assert caught.value.repair


@pytest.mark.parametrize("size", [0, -3, 2.5, "8", None, True])
def test_a_batch_holds_a_whole_number_of_calls(size: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Batch(size)
    assert (caught.value.path, caught.value.value) == ("Batch(size=)", size)
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("wait_s", [-0.1, float("nan"), float("inf"), "1", None])
def test_a_batch_waits_a_finite_time(wait_s: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Batch(2, wait_s)
    assert (caught.value.path, caught.value.value) == ("Batch(wait_s=)", wait_s)
    assert caught.value.rule
    assert caught.value.repair


@pytest.mark.parametrize("batch", [0, -1, "8", 2.5, [4], True])
def test_an_endpoint_takes_a_batch_or_a_number(batch: Any) -> None:
    with pytest.raises(OptionError) as caught:
        endpoint(batch=batch)(plain)
    assert caught.value.value == batch
    assert caught.value.path
    assert caught.value.rule
    assert caught.value.repair
