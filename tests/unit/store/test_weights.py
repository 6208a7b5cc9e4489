"""What a user can do wrong with the store: each says what, where, why and how to repair it, and loses nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

import forge.store as ts
from forge.errors import MISSING, StoreError, StoreKeyError, WeightMismatch
from forge.store.client import client
from forge.store.objects import MAX_REST
from store_scenarios import alone

Body = Callable[[], Coroutine[Any, Any, Any]]


def check_says_all(error: StoreError, *, has_path: bool = True) -> None:
    said = {name: getattr(error, name) for name in ("rule", "repair") if getattr(error, name)}
    assert set(said) == {"rule", "repair"}, f"it does not say all: {error!s}"
    assert error.value is not MISSING, f"it does not say the value: {error!s}"
    assert error.path or not has_path, f"it does not say where: {error!s}"


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    """A device mesh of one rank."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "  "},
        {"name": 5},
        {"keep": 0},
        {"keep": -1},
        {"keep": 1.5},
        {"keep": True},
        {"keep": "2"},
        {"rank": 0},
        {"world_size": 1},
        {"rank": 1, "world_size": 1},
        {"rank": -1, "world_size": 1},
        {"rank": 0, "world_size": 0},
        {"rank": 0.5, "world_size": 2},
        {"rank": "0", "world_size": 2},
        {"rank": 0, "world_size": "2"},
        {"rank": True, "world_size": 2},
        {"dtype": torch.int8},
        {"dtype": "bfloat16"},
        {"on": "disk"},
        {"on": None},
        {"verify": "sometimes"},
        {"verify": None},
        {"verify": True},
    ],
    ids=str,
)
def test_weights_are_made_with_what_makes_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(StoreError) as caught:
        ts.Weights(**{"name": "policy", **wrong})
    check_says_all(caught.value)
    assert "Weights(" in str(caught.value.path)


async def check_kept() -> None:
    """What was stored before the mistake is there, whole, and nobody holds it by mistake."""
    found = await ts.get("kept")
    assert torch.equal(found["a"], torch.arange(6).view(2, 3))
    assert found["text"] == "as it was"
    assert await ts.keys() == ["kept"]
    fetched = await ts.Weights("policy").fetch(verify="full")
    assert (fetched.version, sorted(fetched.tensors)) == (3, ["b", "w"])
    assert torch.equal(fetched.tensors["w"], torch.arange(6.0).view(2, 3))
    fetched.release()


async def check_nobody_reads() -> None:
    for key in (("object", "kept"), ("weights", "policy")):
        readers = [info.num_readers for info in await client().line.call_async("versions", key)]
        assert readers == [0], f"a mistake keeps {key[1]!r} leased for ever"


async def prepare() -> ts.Weights:
    torch.set_num_threads(1)
    await ts.put("kept", {"a": torch.arange(6).view(2, 3), "text": "as it was"})
    policy = ts.Weights("policy", rank=0, world_size=1)
    await policy.publish({"w": torch.arange(6.0).view(2, 3), "b": torch.ones(())}, version=3)
    return policy


Wrong = Callable[[ts.Weights], Any]


def refused(wrong: Wrong, kind: type[StoreError], *, has_path: bool = True, leases: bool = True) -> StoreError:
    """Do something wrong after something right; the error."""
    found: list[StoreError] = []

    async def scenario() -> None:
        policy = await prepare()
        with pytest.raises(kind) as caught:
            await wrong(policy)
        found.append(caught.value)
        if leases:
            await check_nobody_reads()
        await check_kept()

    alone(scenario)
    check_says_all(found[0], has_path=has_path)
    return found[0]


T = torch.zeros(2, 3)
LONG = torch.zeros(2, 3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        pytest.param(lambda _: ts.put("", T), StoreError, id="put-empty-key"),
        pytest.param(lambda _: ts.put(5, T), StoreError, id="put-number-as-key"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get(None), StoreError, id="get-none"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.exists(b"k"), StoreError, id="exists-bytes"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.delete(), StoreError, id="delete-nothing"),
        pytest.param(lambda _: ts.delete("kept", prefix="k"), StoreError, id="delete-both"),
        pytest.param(lambda _: ts.delete(""), StoreError, id="delete-empty"),
        pytest.param(lambda _: ts.delete(5), StoreError, id="delete-number"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.delete(prefix=5), StoreError, id="delete-prefix-number"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.keys(5), StoreError, id="keys-number"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("kept", verify="much"), StoreError, id="get-verify"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("nothing"), StoreKeyError, id="get-unknown"),
        pytest.param(lambda _: ts.get_state_dict("nothing", {}), StoreKeyError, id="get-unknown-state"),
        pytest.param(lambda _: ts.put("kept", threading.Lock()), StoreError, id="put-a-lock"),
        pytest.param(lambda _: ts.put("kept", bytes(MAX_REST + 1)), StoreError, id="put-too-large"),
        pytest.param(lambda _: ts.put("kept", {"a": {"b": T}, "a.b": T}), StoreError, id="put-colliding-names"),
        pytest.param(lambda _: ts.put("kept", {"x": T.to_sparse()}), StoreError, id="put-sparse"),
        pytest.param(lambda _: ts.put("kept", {"x": T.to("meta")}), StoreError, id="put-meta"),
        pytest.param(lambda _: ts.put("kept", T, dtype="bfloat16"), StoreError, id="put-dtype-string"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.put("kept", T, dtype=torch.int8), StoreError, id="put-dtype-whole"),
        pytest.param(lambda _: ts.put_state_dict("kept", T), StoreError, id="put-state-tensor"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.put_state_dict("kept", [T]), StoreError, id="put-state-list"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.setup(volumes=-1), StoreError, id="setup-negative"),
        pytest.param(lambda _: ts.setup(volumes=1.0), StoreError, id="setup-float"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.setup(volumes=True), StoreError, id="setup-bool"),
        pytest.param(lambda _: ts.setup(volumes=1, copies=0), StoreError, id="setup-no-copies"),
        pytest.param(lambda _: ts.setup(volumes=1, copies=2), StoreError, id="setup-too-many-copies"),
    ],
)
def test_keys_and_values(wrong: Wrong, kind: type[StoreError]) -> None:
    refused(wrong, kind)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        pytest.param(lambda _: ts.get("kept", into={"a": T}), StoreError, id="dtype"),
        pytest.param(lambda _: ts.get("kept", into={"a": torch.zeros(3, 2).long()}), StoreError, id="shape"),
        pytest.param(lambda _: ts.get("kept", into={"b": LONG}), WeightMismatch, id="unknown-name"),
        pytest.param(lambda _: ts.get("kept", into=LONG), WeightMismatch, id="tensor-for-dict"),
        pytest.param(lambda _: ts.get("kept", into=[LONG]), WeightMismatch, id="list-for-dict"),
        pytest.param(lambda _: ts.get("kept", into={"a": 5}), StoreError, id="number"),
        pytest.param(lambda _: ts.get("kept", into="memory"), StoreError, id="string"),
        pytest.param(lambda _: ts.get("kept", into={"a.b": LONG, "a": {"b": LONG}}), StoreError, id="colliding"),
        pytest.param(lambda _: ts.get("kept", into={"a": LONG[:1].expand(2, 3)}), StoreError, id="expanded"),
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(LONG, (1, 0))}), StoreError, id="at-outside"),
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(LONG, (0,))}), StoreError, id="at-dimensions"),
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(LONG, [0, 0])}), StoreError, id="at-list"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(LONG, 0)}), StoreError, id="at-number"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(5)}), StoreError, id="at-no-tensor"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(LONG, ts.Chunk(0, 0, 2))}), StoreError, id="at-size"),
        pytest.param(lambda _: ts.get("kept", into={"a": ts.At(LONG, of="c")}), WeightMismatch, id="at-of-unknown"),
        pytest.param(lambda _: ts.get("kept", into={"a": LONG, "q": LONG}), WeightMismatch, id="one-too-many"),
        pytest.param(lambda _: ts.get_state_dict("kept", {"b": LONG}), WeightMismatch, id="state-unknown"),
        pytest.param(lambda _: ts.get_state_dict("kept", {}), WeightMismatch, id="state-missing"),
        pytest.param(
            lambda _: ts.get_state_dict("kept", {"a.b": LONG, "a": {"b": LONG}}), StoreError, id="state-twice"
        ),
        pytest.param(lambda _: ts.get_state_dict("kept", {"a": LONG}, verify="so"), StoreError, id="state-verify"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("kept", spec=ts.Region((0, 0), (3, 3))), StoreError, id="region-outside"),
        pytest.param(lambda _: ts.get("kept", spec=ts.Region((0,), (1,))), StoreError, id="region-dimensions"),
        pytest.param(lambda _: ts.get("kept", spec=ts.Region((-1, 0), (1, 3))), StoreError, id="region-before"),
        pytest.param(lambda _: ts.get("kept", spec=ts.Region((0, 0), (-1, 3))), StoreError, id="region-negative"),
        pytest.param(
            lambda _: ts.get("kept", spec=ts.Region((0, 0), (1 << 40, 1 << 40))), StoreError, id="region-huge"
        ),
        pytest.param(lambda _: ts.get("kept", spec=ts.Chunk(2, 0, 2)), StoreError, id="chunk-dimension"),
        pytest.param(lambda _: ts.get("kept", spec=ts.Chunk(0, 2, 2)), StoreError, id="chunk-index"),
        pytest.param(lambda _: ts.get("kept", spec=ts.Chunk(0, 0, 0)), StoreError, id="chunk-of-none"),
        pytest.param(lambda _: ts.get("kept", spec={"b": ts.Chunk(0, 0, 2)}), StoreError, id="spec-unknown"),
        pytest.param(lambda _: ts.get("kept", spec=(0, 1)), StoreError, id="spec-tuple"),  # type: ignore[arg-type]
        pytest.param(lambda _: ts.get("kept", spec={"a": 5}), StoreError, id="spec-number"),  # type: ignore[dict-item]
    ],
)
def test_memory_to_fill(wrong: Wrong, kind: type[StoreError]) -> None:
    refused(wrong, kind, has_path=kind is not WeightMismatch)


async def publish(policy: ts.Weights, state: Any, version: Any = 4) -> None:
    await policy.publish(state, version=version)


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        pytest.param(lambda w: publish(w, {}), StoreError, id="publish-nothing"),
        pytest.param(lambda w: publish(w, [T]), StoreError, id="publish-list"),
        pytest.param(lambda w: publish(w, {"w": 5}), StoreError, id="publish-number"),
        pytest.param(lambda w: publish(w, {"w": {"x": T}}), StoreError, id="publish-nested"),
        pytest.param(lambda w: publish(w, {5: T}), StoreError, id="publish-number-as-name"),
        pytest.param(lambda w: publish(w, {"w": T.to_sparse()}), StoreError, id="publish-sparse"),
        pytest.param(lambda w: publish(w, {"w": T.to("meta")}), StoreError, id="publish-meta"),
        pytest.param(lambda w: publish(w, {"w": T}, -1), StoreError, id="publish-negative"),
        pytest.param(lambda w: publish(w, {"w": T}, 4.0), StoreError, id="publish-float"),
        pytest.param(lambda w: publish(w, {"w": T}, True), StoreError, id="publish-bool"),
        pytest.param(lambda w: publish(w, {"w": T}, "latest"), StoreError, id="publish-string"),
        pytest.param(lambda w: publish(w, {"w": T}, 3), StoreError, id="publish-again"),
        pytest.param(lambda w: publish(w, {"w": T}, 0), StoreError, id="publish-the-past"),
        pytest.param(lambda _: publish(ts.Weights("policy", on="cuda"), {"w": T}), StoreError, id="publish-on-no-gpu"),
        pytest.param(lambda w: w.fetch(version=2), StoreKeyError, id="fetch-the-past"),
        pytest.param(lambda w: w.fetch(version=4, wait_s=0.01), StoreKeyError, id="fetch-the-future"),
        pytest.param(lambda w: w.fetch(version="newest"), StoreError, id="fetch-string"),
        pytest.param(lambda w: w.fetch(version=-1), StoreError, id="fetch-negative"),
        pytest.param(lambda w: w.fetch(verify="so"), StoreError, id="fetch-verify"),
        pytest.param(lambda _: ts.Weights("nothing").fetch(), StoreKeyError, id="fetch-unknown"),
        pytest.param(lambda w: w.fetch({"w": T}), WeightMismatch, id="fetch-not-all"),
        pytest.param(lambda w: w.fetch({}), WeightMismatch, id="fetch-nothing"),
        pytest.param(lambda w: w.fetch({"x": T}, strict=False), WeightMismatch, id="fetch-unknown-name"),
        pytest.param(lambda w: w.fetch({"w": LONG}, strict=False), StoreError, id="fetch-dtype"),
        pytest.param(lambda w: w.fetch({"w": T.T}, strict=False), StoreError, id="fetch-shape"),
        pytest.param(lambda w: w.fetch({"w": None}, strict=False), StoreError, id="fetch-into-none"),
        pytest.param(lambda w: w.fetch({"w": [T]}, strict=False), StoreError, id="fetch-into-list-of-tensors"),
        pytest.param(lambda w: w.fetch([T]), StoreError, id="fetch-into-list"),
        pytest.param(lambda w: w.fetch(T), StoreError, id="fetch-into-tensor"),
        pytest.param(lambda w: w.wait(at_least=-1), StoreError, id="wait-negative"),
        pytest.param(lambda w: w.wait(at_least=9, timeout_s=0.01), StoreError, id="wait-in-vain"),
        pytest.param(lambda w: w.retire(keep=-1), StoreError, id="retire-negative"),
        pytest.param(lambda w: w.retire(keep=1.0), StoreError, id="retire-float"),
        pytest.param(lambda w: w.rewind(to=-2), StoreError, id="rewind-negative"),
        pytest.param(lambda w: w.rewind(to=None), StoreError, id="rewind-none"),
    ],
)
def test_weights(wrong: Wrong, kind: type[StoreError]) -> None:
    refused(wrong, kind, has_path=kind is not WeightMismatch)


def test_another_rank_that_never_comes() -> None:
    def wrong(_: ts.Weights) -> Any:
        return publish_with_limit(ts.Weights("policy", rank=0, world_size=2))

    assert "rank(s) [1] of 2" in refused(wrong, StoreError).message


async def publish_with_limit(policy: ts.Weights) -> None:
    await policy.publish({"w": T}, version=4, timeout_s=0.01)


def test_names_that_are_missing_or_unknown_are_named() -> None:
    assert refused(lambda w: w.fetch({"w": T}), WeightMismatch, has_path=False).tensors == ("b",)  # type: ignore[attr-defined]
    both = refused(lambda w: w.fetch({"w": T, "x": T, "y": T}), WeightMismatch, has_path=False)
    assert both.tensors == ("x", "y")  # type: ignore[attr-defined]


def test_a_value_that_is_gone() -> None:
    async def scenario() -> None:
        await ts.put("a/1", T)
        await ts.put("a/2", T)
        await ts.put("b", T)
        assert await ts.delete("a/1") == 1
        assert await ts.delete("a/1") == 0
        assert not await ts.exists("a/1")
        for again in ({}, {"into": T}, {"spec": ts.Chunk(0, 0, 1)}):
            with pytest.raises(StoreKeyError, match="no 'a/1'") as caught:
                await ts.get("a/1", **again)  # type: ignore[arg-type]
            check_says_all(caught.value)
        assert await ts.keys() == ["a/2", "b"]
        assert await ts.delete("a/") == 1
        assert await ts.delete(prefix="") == 1
        assert await ts.keys() == []

    alone(scenario)


class Unreadable:
    """Can be pickled and not be read again."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_value_that_cannot_be_read_again_is_let_go() -> None:
    async def scenario() -> None:
        await prepare()
        await ts.put("kept", {"x": Unreadable()})
        for _ in range(3):
            with pytest.raises(ValueError, match="invalid literal"):
                await ts.get("kept")
        await check_nobody_reads()

    alone(scenario)


def test_many_readers_of_many_keys_at_once() -> None:
    """More keys than a process remembers the layouts of, twice, all at once."""

    async def scenario() -> None:
        count = 300
        await asyncio.gather(*(ts.put(f"k{number}", number) for number in range(count)))
        for _ in range(2):
            found = await asyncio.gather(*(ts.get(f"k{number}") for number in range(count)))
            assert found == list(range(count))

    alone(scenario)


def test_a_sum_that_is_not_there_yet_is_refused(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial

    terms = DTensor.from_local(T, mesh, [Partial()], run_check=False)
    error = refused(lambda _: ts.put("kept", {"layers": [terms]}), StoreError)
    assert (error.path, "Partial" in error.message, "redistribute" in str(error.repair)) == ("layers.0", True, True)
    error = refused(lambda w: publish(w, {"w": terms}), StoreError)
    assert error.path == "w"
    refused(lambda w: w.fetch({"w": terms}, strict=False), StoreError)
