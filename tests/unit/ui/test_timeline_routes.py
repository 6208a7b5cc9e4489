"""The addresses of the timeline, of profiles, and of what processes use."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from forge.observe.fault_records import FaultFile, FaultRecord
from forge.observe.jsonl import JsonlSink
from forge.observe.trace_file import TraceFile
from forge.observe.tracing import ORIGIN_NS, Process, Span
from forge.ui.timeline_routes import MAX_DOWNLOADS
from forge.ui.trace_index import BLOCK
from run_folders import make_grpo_run, write_metrics, write_trace
from ui_serving import Client, ui_client


def with_ui(folder: Path, body: Callable[[Client], Awaitable[None]]) -> None:
    async def inside() -> None:
        async with ui_client(folder) as client:
            await body(client)

    asyncio.run(inside())


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a b"
    folder.mkdir()
    sink = JsonlSink(folder / "metrics.jsonl", clock=lambda: ORIGIN_NS / 1e9 + 4.75)
    sink.write(3, {"train/loss": 1.0})
    sink.close()
    write_trace(folder / "trace.json", 10)
    return folder


def test_a_window_has_its_spans_and_the_steps_as_a_ruler(run: Path) -> None:
    async def body(client: Client) -> None:
        view = await client.get("/api/timeline", run="a b", start=4.2, end=5.2)
        assert [start / 1e6 for start in view["spans"]["start"]] == [4.0, 5.0]
        assert view["steps"] == [[3, pytest.approx(4.75, abs=1e-3)]]
        assert (view["end"], view["progress"], view["names"]) == (9.5, 1.0, ["train"])
        (first, _) = view["spans"]["offset"]
        assert await client.get("/api/timeline/span", run="a b", offset=first) == {"name": "train", "args": {"step": 4}}
        whole = await client.get("/api/timeline", run="a b")
        assert len(whole["spans"]["lane"]) == 10
        described = await client.get("/api/run", run="a b")
        assert (described["hasTrace"], described["profiles"]) == (True, [])

    with_ui(run.parent, body)


def test_the_trace_and_a_part_of_it_can_be_downloaded(run: Path) -> None:
    async def body(client: Client) -> None:
        async with client.raw("/api/trace", run="a b") as answer:
            assert answer.headers["Content-Disposition"] == 'attachment; filename="a-b-trace.json"'
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
            assert await answer.read() == (run / "trace.json").read_bytes()
        async with client.raw("/api/trace", run="a b", start=2.1, end=3.1) as answer:
            events = json.loads(await answer.text())
        assert [event["args"]["step"] for event in events if event["ph"] == "X"] == [2, 3]
        assert {event["name"] for event in events if event["ph"] == "M"} >= {"process_name", "thread_name", "trace"}

    with_ui(run.parent, body)


def test_a_part_is_whole_where_a_block_has_nothing_of_it(run: Path) -> None:
    """Blocks follow each other in the file, not in time: one can reach over a part and have no span in it."""
    path = run / "trace.json"
    path.unlink()
    spans = [made_span(at, [0.0, 9.0][at % 2]) for at in range(4000)] + [made_span(7, 5.0), made_span(8, 1.0)]
    with TraceFile(path, resume_step=None) as file:
        file.write(spans)
    assert path.stat().st_size > 2 * BLOCK

    async def body(client: Client) -> None:
        async with client.raw("/api/trace", run="a b", start=4, end=6) as answer:
            events = json.loads(await answer.text())
        assert [event["args"]["step"] for event in events if event["ph"] == "X"] == [7]

    with_ui(run.parent, body)


def made_span(step: int, start_s: float) -> Span:
    start = ORIGIN_NS + round(1e9 * start_s)
    return Span("train", start, start + 1000, Process("host", 10, "controller"), "Task", {"step": step, "x": "y" * 100})


def test_profiles_are_listed_and_downloaded_by_their_names_alone(run: Path) -> None:
    place = run / "profiles"
    place.mkdir()
    (place / "step-00000003-trainer-0.json.gz").write_bytes(gzip.compress(b"{}"))
    (place / "step-00000002-trainer-0.json").write_text("{}")
    (place / "notes.txt").write_text("x")
    (place / ".step.json.gz.part").write_text("x")
    (place / "step-00000001-link.json").symlink_to("/etc/passwd")
    (place / "folder.json").mkdir()

    async def body(client: Client) -> None:
        found = (await client.get("/api/run", run="a b"))["profiles"]
        assert [each["name"] for each in found] == ["step-00000003-trainer-0.json.gz", "step-00000002-trainer-0.json"]
        async with client.raw("/api/profile", run="a b", name=found[0]["name"]) as answer:
            assert (answer.status, answer.content_type) == (200, "application/gzip")
            assert gzip.decompress(await answer.read()) == b"{}"
        for name in ("../trace.json", "notes.txt", "step-00000001-link.json", "folder.json", "", "/etc/passwd"):
            async with client.raw("/api/profile", run="a b", name=name) as answer:
                assert answer.status == 404

    with_ui(run.parent, body)


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        ("/api/timeline", {"run": "no"}, 404), ("/api/timeline", {"start": "2", "end": "1"}, 400),
        ("/api/timeline", {"start": "nan", "end": "1"}, 400), ("/api/timeline", {"points": "5"}, 400),
        ("/api/timeline", {"points": "5000"}, 400), ("/api/trace", {"start": "1"}, 400),
        ("/api/trace", {"run": "no"}, 404),
        ("/api/trace", {"start": "2", "end": "2"}, 400), ("/api/timeline/span", {"offset": "3"}, 404),
        ("/api/timeline/span", {"offset": "-1"}, 400), ("/api/timeline/span", {"offset": "99999999999"}, 404),
        ("/api/metrics", {"of": "others"}, 400),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(run: Path, path: str, parameters: dict[str, str], status: int) -> None:
    async def body(client: Client) -> None:
        async with client.raw(path, **{"run": "a b", **parameters}) as answer:
            assert answer.status == status
            assert (await answer.json())["error"]["message"]

    with_ui(run.parent, body)


def test_without_a_trace_there_is_an_empty_timeline_and_no_download(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    write_metrics(folder, 2)
    (tmp_path / "secret").write_text("secret")
    (folder / "trace.json").symlink_to(tmp_path / "secret")

    async def body(client: Client) -> None:
        view = await client.get("/api/timeline", run="run")
        assert (view["spans"]["lane"], view["lanes"], view["steps"]) == ([], [], [])
        for query in ({}, {"start": "0", "end": "1"}):
            async with client.raw("/api/trace", run="run", **query) as answer:
                assert "secret" not in await answer.text()
                assert answer.status == (200 if query else 404)
        assert not (await client.get("/api/run", run="run"))["hasTrace"]

    with_ui(tmp_path, body)


def test_downloads_are_bounded(run: Path) -> None:
    with (run / "trace.json").open("ab") as file:
        file.truncate(64 << 20)  # more than sockets hold, so that downloads last

    async def body(client: Client) -> None:
        answers = [await client.raw("/api/trace", run="a b").__aenter__() for _ in range(MAX_DOWNLOADS)]
        assert {answer.status for answer in answers} == {200}
        async with client.raw("/api/trace", run="a b") as refused:
            assert refused.status == 503
        for answer in answers:
            answer.close()
        while True:  # a download whose reader has left makes room
            async with client.raw("/api/trace", run="a b") as answer:
                if answer.status == 200:
                    return

    with_ui(run.parent, body)


def test_what_processes_use_is_a_table_with_charts_of_its_own(run: Path) -> None:
    sink = JsonlSink(run / "system.jsonl")
    values = {f"version/generator[{number}]": float(number) for number in (10, 2, 1)}
    sink.write(1, {"cpu/trainer": 2.0, "memory_gib/trainer": 1.0, "buffer/ready": 3.0, "odd/thing": 1.0, **values})
    sink.write(2, {"cpu/trainer": 3.0})

    async def body(client: Client) -> None:
        found = await client.get("/api/run", run="a b")
        charts = {chart["title"]: [one["label"] for one in chart["series"]] for chart in found["systemCharts"]}
        assert charts["CPU"] == ["trainer"]
        assert charts["Weight version"] == ["generator[1]", "generator[2]", "generator[10]"]
        assert charts["odd/thing"] == ["thing"]
        assert found["status"]["system"]["numRows"] == 2
        table = await client.get("/api/metrics", run="a b", of="system")
        assert (table["steps"], table["columns"]["cpu/trainer"]) == ([1, 2], [2, 3])
        async with client.events(run="a b") as following:
            await following("run")
            sink.write(3, {"cpu/trainer": 4.0})
            while (await following("run"))["system"]["lastStep"] != 3:
                pass
        rows = await client.get("/api/metrics", run="a b", of="system", first=3)
        assert (rows["steps"], rows["table"]) == ([3], table["table"])

    with_ui(run.parent, body)
    sink.close()


def test_faults_are_described_and_a_page_hears_of_new_ones(run: Path) -> None:
    (run / "faults.jsonl").write_text('not json\n[1]\n{"message": {"odd": 1}, "time": 5}\n')
    file = FaultFile(run / "faults.jsonl", is_resumed=True)

    async def body(client: Client) -> None:
        async with client.events(run="a b") as following:
            details = (await following("run"))["details"]
            file.write(3, [FaultRecord(1.0, "reward", "no number", traceback="<b>trace</b>")])
            while (await following("run"))["details"] == details:
                pass
        found = (await client.get("/api/run", run="a b"))["faults"]
        assert found[0]["message"] == {"odd": 1}
        assert (found[1]["kind"], found[1]["traceback"]) == ("reward", "<b>trace</b>")

    with_ui(run.parent, body)


def test_a_run_of_an_earlier_release_has_none_of_it(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "old", num_steps=3)

    async def body(client: Client) -> None:
        found = await client.get("/api/run", run="old")
        assert (found["faults"], found["profiles"], found["hasTrace"], found["systemCharts"]) == ([], [], False, [])
        assert found["canControl"] is False

    with_ui(tmp_path, body)
