"""Figures that are noted anywhere: what they come to, whoever noted them and however they were split."""

from __future__ import annotations

import math
import os
import pickle
import random
import statistics
import threading
from collections.abc import Sequence

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forge.errors import DataError
from forge.observe import Reduce, metrics
from forge.observe.metrics import MAX_KEYS, Partials, Recorder, drain_metrics, record_metric, reduced

FINITE = st.floats(-1e6, 1e6)


def partials_of(values: Sequence[float], *, key: str = "a/b") -> Partials:
    """What a process keeps of these values, under every reduction, after a journey to another process."""
    recorder = Recorder()
    for value in values:
        for reduce in Reduce:
            recorder.record(f"{key}_{reduce.value}", value, reduce)
    found: Partials = pickle.loads(pickle.dumps(recorder.drain()))
    return found


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(FINITE, max_size=6), min_size=1, max_size=5).filter(any))
def test_any_split_over_processes_gives_what_all_values_give(split: list[list[float]]) -> None:
    values = [value for part in split for value in part]
    found = reduced(partials_of(part) for part in split)
    about = {"rel": 1e-9, "abs": 1e-6}
    assert found["a/b_mean"] == pytest.approx(statistics.fmean(values), **about)
    assert found["a/b_std"] == pytest.approx(statistics.pstdev(values), **about)
    assert found["a/b_sum"] == pytest.approx(math.fsum(values), **about)
    assert (found["a/b_max"], found["a/b_min"], found["a/b_count"]) == (max(values), min(values), len(values))


def test_a_mean_is_over_values_and_not_over_processes() -> None:
    assert reduced([partials_of([1.0, 1.0, 1.0]), partials_of([5.0])])["a/b_mean"] == 2.0


def test_a_small_spread_far_from_zero_survives() -> None:
    values = [1e9 + offset for offset in (0.0, 0.5, 1.0, 1.5)]
    found = reduced([partials_of(values[:1]), partials_of(values[1:])])
    assert found["a/b_std"] == pytest.approx(statistics.pstdev([0.0, 0.5, 1.0, 1.5]), rel=1e-6)


def test_one_value_has_no_spread_and_no_value_is_no_figure() -> None:
    assert reduced([partials_of([3.0])])["a/b_std"] == 0.0
    assert reduced([partials_of([])]) == {}
    assert reduced([]) == {}


def test_what_is_not_finite_is_counted_apart() -> None:
    found = reduced([partials_of([math.nan, 2.0]), partials_of([math.inf, -math.inf, 4.0])])
    assert (found["a/b_mean"], found["a/b_sum"], found["a/b_max"], found["a/b_min"]) == (3.0, 6.0, 4.0, 2.0)
    assert found["a/b_std"] == 1.0
    assert found["a/b_count"] == 5.0, "calls are counted, whatever the value"
    assert {name: value for name, value in found.items() if name.startswith("nonfinite/")} == {
        f"nonfinite/a/b_{name}": 3.0 for name in ("mean", "sum", "max", "min", "std")
    }


def test_a_key_with_nothing_finite_has_no_figure_but_its_count() -> None:
    recorder = Recorder()
    recorder.record("loss", math.nan)
    assert reduced([recorder.drain()]) == {"nonfinite/loss": 1.0}


def test_draining_begins_anew() -> None:
    recorder = Recorder()
    recorder.record("a", 1.0)
    assert reduced([recorder.drain()]) == {"a": 1.0}
    assert recorder.drain() == {}
    recorder.record("a", 3.0)
    assert reduced([recorder.drain()]) == {"a": 3.0}


def test_threads_lose_nothing() -> None:
    recorder, num_threads, num_each = Recorder(), 8, 500
    start = threading.Barrier(num_threads + 1)

    def work(seed: int) -> None:
        start.wait()
        for value in range(num_each):
            recorder.record("sum", float(value), Reduce.SUM)
            recorder.record(f"own_{random.Random(seed).randrange(3)}", 1.0, Reduce.COUNT)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    start.wait()
    drained = [recorder.drain() for _ in range(50)]
    for thread in threads:
        thread.join()
    found = reduced([*drained, recorder.drain()])
    assert found["sum"] == num_threads * num_each * (num_each - 1) / 2
    assert sum(value for name, value in found.items() if name.startswith("own_")) == num_threads * num_each


def test_a_thread_that_interrupts_itself_does_not_wait_for_itself() -> None:
    recorder = Recorder()

    class Odd:
        def __float__(self) -> float:
            recorder.record("inner", 1.0)
            return 2.0

    with recorder._lock:  # where a signal handler may find it
        recorder.record("outer", Odd())  # type: ignore[arg-type]
    assert reduced([recorder.drain()]) == {"inner": 1.0, "outer": 2.0}


@pytest.mark.parametrize("drains", [False, True])
def test_another_reduction_of_the_same_key_is_refused(drains: bool) -> None:
    recorder = Recorder()
    recorder.record("reward", 1.0, Reduce.MEAN)
    if drains:
        recorder.drain()
    with pytest.raises(DataError) as caught:
        recorder.record("reward", 1.0, Reduce.SUM)
    assert "Reduce.MEAN" in caught.value.message
    assert "Reduce.SUM" in caught.value.message
    assert (caught.value.path, caught.value.value) == ("reward", "Reduce.SUM")
    assert "one way to reduce each key" in (caught.value.rule or "")
    assert "reward_sum" in (caught.value.repair or "")


def test_two_processes_that_disagree_are_told_apart_too() -> None:
    first, second = Recorder(), Recorder()
    first.record("reward", 1.0, Reduce.MAX)
    second.record("reward", 1.0, Reduce.MIN)
    with pytest.raises(DataError, match=r"Reduce\.MIN, and elsewhere with Reduce\.MAX"):
        reduced([first.drain(), second.drain()])


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "a b", "a\n", "ä", "nonfinite/a", "a" * 201, 7, None, ("a", "b")], ids=repr
)
def test_what_is_no_key_is_refused(key: object) -> None:
    recorder = Recorder()
    with pytest.raises(DataError) as caught:
        recorder.record(key, 1.0)  # type: ignore[arg-type]
    assert (caught.value.path, caught.value.value) == ("record_metric(key)", key)
    assert caught.value.rule is not None
    assert "rollout/reward_mean" in (caught.value.repair or "")
    assert recorder.drain() == {}


@pytest.mark.parametrize("key", ["a", "rollout/reward_mean", "evaluation/pass@8", "train/ratio.p99", "expert[3]/load"])
def test_what_is_a_key_is_taken(key: str) -> None:
    recorder = Recorder()
    recorder.record(key, 1.0)
    assert reduced([recorder.drain()]) == {key: 1.0}


@pytest.mark.parametrize("value", ["1.5", b"1", None, [1.0], numpy.ones(3), 1j], ids=repr)
def test_what_is_no_number_is_refused(value: object) -> None:
    recorder = Recorder()
    with pytest.raises(DataError) as caught:
        recorder.record("a", value)  # type: ignore[arg-type]
    assert caught.value.path == "a"
    assert caught.value.value is value
    assert "one number" in (caught.value.rule or "")
    assert ".item()" in (caught.value.repair or "")


def test_numbers_of_every_kind_are_taken() -> None:
    recorder = Recorder()
    for value in (1, True, numpy.float32(0.5), numpy.array([2.5]).reshape(()), 10**400):
        recorder.record("a", value, Reduce.SUM)  # type: ignore[arg-type]
    assert reduced([recorder.drain()]) == {"a": 5.0, "nonfinite/a": 1.0}, "a whole number too large is infinite"


def test_what_is_no_reduction_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        Recorder().record("a", 1.0, "mean")  # type: ignore[arg-type]
    assert (caught.value.path, caught.value.value) == ("a", "mean")
    assert "Reduce.MEAN, Reduce.SUM" in (caught.value.rule or "")
    assert caught.value.repair == "write Reduce.MEAN, or leave it out"


def test_keys_that_are_made_of_data_are_refused_in_time() -> None:
    recorder = Recorder()
    for number in range(MAX_KEYS):
        recorder.record(f"prompt/{number}", 1.0)
    with pytest.raises(DataError) as caught:
        recorder.record("prompt/more", 1.0)
    assert (caught.value.path, caught.value.value) == ("prompt/more", MAX_KEYS + 1)
    assert str(MAX_KEYS) in (caught.value.rule or "")
    assert "ids" in (caught.value.repair or "")
    recorder.record("prompt/0", 3.0)
    assert reduced([recorder.drain()])["prompt/0"] == 2.0


def test_the_process_has_one_recorder_and_a_child_its_own() -> None:
    drain_metrics()
    record_metric("own", 2.0)
    record_metric("own", 4.0)
    child = os.fork()
    if child == 0:
        try:
            was_empty = metrics.drain_metrics() == {}
            record_metric("own", 1.0, Reduce.SUM)  # also what a key means begins anew
        finally:
            os._exit(0 if was_empty else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert reduced([drain_metrics()]) == {"own": 3.0}
