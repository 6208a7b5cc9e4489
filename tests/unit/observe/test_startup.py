"""The phases of a start: what is kept of them, what is told, and what it costs."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path

import pytest

from forge.observe.monitor import StartLines, current_monitor, monitored, note_lost, note_started
from forge.observe.phases import PhaseEvent, has_listener, phase, set_listener, take_phase
from forge.observe.startup import StartPhase, StartUp, kind_of, longest, own_seconds, read_startup, summary
from forge.observe.tracing import drain_trace, switch_tracing


def begun(process: str, number: int, name: str, *, total: float = 0.0) -> PhaseEvent:
    return PhaseEvent(process, number, name, "begun", 0.0, 0.0, total)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def started(folder: Path | None = None) -> tuple[StartUp, Clock]:
    clock = Clock()
    startup = StartUp(clock=clock)
    if folder is not None:
        startup.write_to(folder)
    return startup, clock


def test_the_file_has_every_phase_of_every_process(tmp_path: Path) -> None:
    startup, clock = started(tmp_path / "run")
    startup.take(begun("trainer-0", 1, "setting up"))
    clock.now_s += 1
    startup.take(begun("trainer-0", 2, "loading weights", total=8.0))
    clock.now_s += 2
    startup.take(PhaseEvent("trainer-0", 2, "loading weights", "done", 2.0, 8.0, 8.0, "B"))
    startup.take(begun("generator-1", 1, "capturing graphs"))
    clock.now_s += 1
    startup.take(PhaseEvent("trainer-0", 1, "setting up", "done", 4.0))
    found = read_startup(tmp_path / "run")
    assert found is not None
    assert (found["state"], found["seconds"]) == ("running", 4.0)
    assert startup.finish() == "Started in 4.0 s: trainer setting up 2.0 s, trainer loading weights 2.0 s"
    found = read_startup(tmp_path / "run")
    assert found is not None
    assert found["state"] == "done"
    assert found["phases"] == [
        {"process": "trainer-0", "phase": "setting up", "start_s": 0.0, "seconds": 4.0, "own_s": 2.0, "state": "done"},
        {
            "process": "trainer-0",
            "phase": "loading weights",
            "start_s": 1.0,
            "seconds": 2.0,
            "own_s": 2.0,
            "done": 8.0,
            "total": 8.0,
            "unit": "B",
            "state": "done",
        },
        {
            "process": "generator-1",
            "phase": "capturing graphs",
            "start_s": 3.0,
            "seconds": 0.0,
            "own_s": 0.0,
            "state": "running",
        },
    ]


def test_the_file_is_there_while_a_run_starts_and_when_it_fails(tmp_path: Path) -> None:
    startup, clock = started(tmp_path)
    startup.take(begun("trainer-0", 1, "starting"))
    startup.take(PhaseEvent("trainer-0", 1, "starting", "done", 0.0))
    for number in range(2, 100):  # written again twice a second at most
        startup.take(begun("trainer-0", number, "more"))
        startup.take(PhaseEvent("trainer-0", number, "more", "done", 0.0))
    found = read_startup(tmp_path)
    assert found is not None
    assert len(found["phases"]) == 1
    startup.take(begun("generator-0", 1, "loading weights"))
    clock.now_s += 3
    startup.lose("generator-0")
    startup.fail()
    startup.fail()
    found = read_startup(tmp_path)
    assert found is not None
    assert found["state"] == "failed"
    last = found["phases"][-1]
    assert (last["process"], last["state"], last["seconds"]) == ("generator-0", "failed", 3.0)
    assert [path.name for path in tmp_path.iterdir()] == ["startup.json"]


def test_a_folder_that_cannot_be_written_does_not_end_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    startup, _ = started(tmp_path / "file" / "run")
    for _ in range(2):
        assert startup.finish().startswith("Started in ")
    assert len(caplog.messages) == 1
    assert "could not be written" in caplog.messages[0]


def test_what_each_process_does_now_is_the_innermost_of_its_phases() -> None:
    startup, clock = started()
    startup.take(begun("trainer-0", 1, "setting up"))
    startup.take(begun("trainer-0", 2, "loading weights"))
    startup.take(begun("rewards-0", 1, "starting"))
    clock.now_s += 5
    assert [(phase.process, phase.name, phase.seconds) for phase in startup.running()] == [
        ("trainer-0", "loading weights", 5.0),
        ("rewards-0", "starting", 5.0),
    ]
    startup.take(PhaseEvent("trainer-0", 2, "loading weights", "done", 5.0))
    assert [phase.name for phase in startup.running()] == ["setting up", "starting"]


def test_time_is_counted_once() -> None:
    outer = StartPhase("a-0", "setting up", 0.0, 10.0)
    inner = [StartPhase("a-0", "x", 1.0, 3.0), StartPhase("a-0", "y", 3.0, 4.0), StartPhase("b-0", "x", 0.0, 9.0)]
    assert own_seconds([outer, *inner]) == [4.0, 3.0, 4.0, 9.0]
    several = [StartPhase("a-0", "x", 0.0, 1.0), StartPhase("a-0", "x", 2.0, 1.5), StartPhase("a-1", "x", 0.0, 2.0)]
    assert longest(several) == [("a x", 2.5)], "the sum of one process, the most of all processes of a kind"


@pytest.mark.parametrize(
    ("process", "kind"),
    [
        ("generator-1", "generator"),
        ("trainer-0-rank-12", "trainer"),
        ("Tok-rank-1", "Tok"),
        ("a.b-2", "a.b"),
        ("x", "x"),
    ],
)
def test_processes_of_a_kind_have_one_name(process: str, kind: str) -> None:
    assert kind_of(process) == kind


def test_the_summary_fits_a_line() -> None:
    phases = [StartPhase(f"a-rather-long-name-{letter}-0", "doing something", 0.0, 5.0) for letter in "abcd"]
    text = summary(1234.5, phases)
    assert text.startswith("Started in 1234 s: a-rather-long-name-a doing something 5.0 s")
    assert len(text) <= 80
    assert summary(0.5, []) == "Started in 0.50 s"


def test_each_kind_of_phase_is_told_once_and_again_when_it_lasts() -> None:
    lines: list[str] = []
    told = StartLines(lines.append, remind_s=15)
    for number in range(4):
        told.tell(StartPhase(f"generator-{number}", "loading weights", 1.0))
    slow = StartPhase("generator-2", "loading weights", 1.0, 10.0, 4.0, 8.0, "B")
    told.remind([slow])
    slow.seconds = 20.0
    told.remind([slow])
    told.remind([slow])
    slow.state = "done"
    slow.seconds = 60.0
    told.tell(slow)
    told.tell(StartPhase("controller", "first weight sync", 70.0))
    assert lines == [
        "Start 0:01 | generator: loading weights",
        "Start 0:21 | generator: loading weights 50% for 0:20",
        "Start 1:10 | first weight sync",
    ]


def test_a_monitor_takes_the_phases_of_this_process_and_of_others(capsys: pytest.CaptureFixture[str]) -> None:
    assert not has_listener()
    with monitored() as monitor:
        assert current_monitor() is monitor
        with monitored() as same:
            assert same is monitor
        with phase("reading", total=4) as progress:
            progress.advance(2)
            progress.reach(4)
        take_phase(begun("trainer-0", 1, "starting"))
        with pytest.raises(RuntimeError), phase("breaking"):
            raise RuntimeError
        note_lost("trainer-0")
        note_started()
        note_started()
        with phase("later"):
            pass
        states = [(each.process, each.name, each.state) for each in monitor.startup.phases]
    assert states == [
        ("controller", "reading", "done"),
        ("trainer-0", "starting", "failed"),
        ("controller", "breaking", "failed"),
    ]
    assert not has_listener()
    assert current_monitor() is None
    lines = capsys.readouterr().err.splitlines()
    assert [line[13:] for line in lines[:3]] == ["reading", "trainer: starting", "breaking"]
    assert lines[3].startswith("Started in ")
    assert len(lines) == 4


@pytest.mark.parametrize("options", [{"progress": False}, {"is_leader": False}])
def test_who_wants_no_progress_gets_none(options: dict[str, bool], capsys: pytest.CaptureFixture[str]) -> None:
    with monitored(**options) as monitor:
        with phase("reading"):
            pass
        monitor.started()
    assert capsys.readouterr().err == ""


def test_phases_of_many_threads_come_together() -> None:
    startup, _ = started()
    set_listener(startup.take)
    try:

        def work() -> None:
            for _ in range(50):
                with phase("a"), phase("b") as progress:
                    progress.advance()

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        set_listener(None)
    assert len(startup.phases) == 400
    assert {phase.state for phase in startup.phases} == {"done"}
    assert startup.running() == []


def test_phases_are_spans_of_a_trace_with_or_without_a_listener() -> None:
    drain_trace()
    switch_tracing(True)
    try:
        with phase("outer"), phase("inner") as progress:
            progress.advance()
            progress.set_total(3)
            progress.reach(2)
    finally:
        switch_tracing(False)
    assert [ended.name for ended in drain_trace().ended] == ["inner", "outer"]


def test_phases_are_logged_and_those_of_a_running_run_are_not_kept(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    caplog.set_level(logging.INFO, "forge.startup")
    startup, _ = started(tmp_path)
    startup.finish()
    before = json.loads((tmp_path / "startup.json").read_text())
    for number in range(10):
        startup.take(begun("trainer-0", number, "loading weights"))
        startup.take(PhaseEvent("trainer-0", number, "loading weights", "done", 1.5))
    startup.take(begun("trainer-0", 99, "loading weights"))
    startup.take(PhaseEvent("trainer-0", 99, "loading weights", "failed", 0.5))
    assert startup.phases == ()
    assert json.loads((tmp_path / "startup.json").read_text()) == before
    assert caplog.messages == [
        *["trainer-0: loading weights took 1.5 s"] * 10,
        "trainer-0: loading weights failed after 0.50 s",
    ]


@pytest.mark.parametrize("text", ["", "[1]", "{broken"])
def test_a_file_that_is_not_one_of_ours_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "startup.json").write_text(text)
    assert read_startup(tmp_path) is None
    assert read_startup(tmp_path / "none") is None
