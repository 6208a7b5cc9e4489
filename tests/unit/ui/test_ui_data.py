"""What the server says of runs, and how a page hears what is new."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from forge.loops.runtime_changes import RuntimeChange, record_change
from forge.observe.jsonl import JsonlSink
from forge.rollout.ledger import Ledger, LedgerLine
from forge.trainer.checkpoint_folder import WriterLock
from run_folders import HOSTILE, make_grpo_run, make_sft_run, write_ledger, write_metrics
from ui_serving import Client, ui_client

Body = Callable[[Client], Awaitable[None]]


def with_ui(folder: Path, body: Body, **options: Any) -> None:
    async def inside() -> None:
        async with ui_client(folder, **options) as client:
            await body(client)

    asyncio.run(inside())


async def until_listed(client: Client, count: int) -> list[dict[str, Any]]:
    """The summaries of `count` runs, as soon as there are so many."""
    known: dict[str, dict[str, Any]] = {}
    async with client.events() as following:
        while len(known) < count:
            known |= {run["id"]: run for run in (await following("list"))["runs"]}
    return sorted(known.values(), key=lambda run: str(run["id"]))


def test_the_list_has_every_run(tmp_path: Path) -> None:
    make_grpo_run(tmp_path / "grpo" / "a", num_steps=3)
    make_sft_run(tmp_path / "b", num_steps=3)

    async def body(client: Client) -> None:
        runs = await until_listed(client, 2)
        assert [(run["id"], run["step"], run["state"]["kind"]) for run in runs] == [
            ("b", 3, "stopped"), ("grpo/a", 3, "finished"),
        ]  # fmt: skip
        found = await client.get("/api/runs")
        assert found["root"] == str(tmp_path)
        assert len(found["runs"]) == 2

    with_ui(tmp_path, body)


def test_a_run_is_described_with_its_charts(tmp_path: Path) -> None:
    folder = make_grpo_run(tmp_path / "run", num_steps=12, max_steps=20)
    record_change(folder, RuntimeChange(5, "rollout.staleness", 2, 2, 1, "forge control"))

    async def body(client: Client) -> None:
        found = await client.get("/api/run", run="run")
        assert (found["run"]["lastStep"], found["run"]["totalSteps"], found["run"]["name"]) == (
            12,
            20,
            "arithmetic-grpo",
        )
        assert ["algorithm", "dapo"] in found["facts"]
        titles = {chart["title"] for chart in found["charts"]}
        assert {"Reward", "KL divergence", "Where the time goes", "runtime/queue_depth"} <= titles
        assert found["status"]["ledger"] == {"trained": 96, "no_signal": 3}
        (change,) = found["changes"]
        assert (change["key"], change["after"], change["by"]) == ("rollout.staleness", 1, "forge control")
        table = await client.get("/api/metrics", run="run")
        assert table["steps"] == list(range(1, 13))
        assert table["table"] == found["status"]["table"]
        assert "runtime/queue_depth" not in table["columns"]
        more = await client.get("/api/metrics", run="run", more=1, first=5, last=6)
        assert (more["steps"], len(more["columns"]["runtime/queue_depth"])) == ([5, 6], 2)
        view = await client.get("/api/config", run="run")
        assert ["run.seed", "7", "0"] in view["rows"]

    with_ui(tmp_path, body)


@pytest.mark.parametrize(
    ("path", "parameters", "status"),
    [
        ("/api/run", {"run": "no"}, 404), ("/api/run", {}, 404), ("/api/metrics", {"run": "../run"}, 404),
        ("/api/config", {"run": "run", "against": "/etc"}, 404), ("/api/events", {"run": "no"}, 404),
        ("/api/metrics", {"run": "run", "points": "1"}, 400), ("/api/metrics", {"run": "run", "points": "9999"}, 400),
        ("/api/metrics", {"run": "run", "first": "nan"}, 400), ("/api/metrics", {"run": "run", "last": "1e999"}, 400),
        ("/api/metrics", {"run": "run", "points": "3.5"}, 400), ("/api/events", {"run": "run", "after": "x"}, 400),
        ("/api/metrics", {"run": "run", "more": "2"}, 400), ("/assets/../../config.yaml", {}, 404),
        ("/api/none", {}, 404),
    ],
)  # fmt: skip
def test_wrong_requests_are_refused(tmp_path: Path, path: str, parameters: dict[str, str], status: int) -> None:
    write_metrics(tmp_path / "run" if (tmp_path / "run").mkdir() is None else tmp_path, 2)

    async def body(client: Client) -> None:
        async with client.raw(path, **parameters) as answer:
            assert answer.status == status
            error = (await answer.json())["error"]
            assert error["message"]

    with_ui(tmp_path, body)


def test_a_page_hears_each_step_as_it_is_written(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.write(1, {"train/loss": 1.0})
    lock = WriterLock(folder)

    async def body(client: Client) -> None:
        table = await client.get("/api/metrics", run="run")
        async with client.events(run="run", table=table["table"], after=table["steps"][-1]) as following:
            status = await following("run")
            assert (status["lastStep"], status["numRows"], status["summary"]["state"]["kind"]) == (1, 1, "running")
            rows = await following("rows")
            assert rows["steps"] == [1]  # the row that the page has last: it may have grown
            for step in (2, 3, 4):
                sink.write(step, {"train/loss": 1 / step, "new/metric": 5.0})
                rows = await following("rows")
                assert rows["steps"] == [step - 1, step]
                assert rows["columns"]["train/loss"][-1] == pytest.approx(1 / step, abs=1e-5)
                assert rows["columns"]["new/metric"][-1] == 5
            sink.write(4, {"evaluation/reward": 0.5})
            rows = await following("rows")
            assert (rows["steps"], rows["columns"]["evaluation/reward"]) == ([4], [0.5])
            lock.release()
            status = await following("run")
            while status["summary"]["state"]["kind"] == "running":
                status = await following("run")
            assert status["summary"]["state"]["kind"] == "stopped"

    try:
        with_ui(tmp_path, body)
    finally:
        lock.release()
        sink.close()


def test_a_page_hears_of_runs_that_come_and_go_and_of_the_rest_of_a_folder(tmp_path: Path) -> None:
    one = make_grpo_run(tmp_path / "one", num_steps=2, max_steps=9)

    async def body(client: Client) -> None:
        await until_listed(client, 1)
        async with client.events(run="one") as following:
            found = await following("list")
            assert [run["id"] for run in found["runs"]] == ["one"]
            details = (await following("run"))["details"]
            record_change(one, RuntimeChange(2, "a.b", 1, 1, 2, "me"))
            while (await following("run"))["details"] == details:
                pass
            ledger = Ledger(one / "ledger.jsonl", resume_step=99)
            ledger.write([LedgerLine(3, 99, 0, "p", "stale")])
            ledger.close()
            while (await following("run"))["ledger"].get("stale") != 1:
                pass
            write_metrics(_made(tmp_path / "two"), 1)
            found = await following("list")
            while "two" not in [run["id"] for run in found["runs"]]:
                found = await following("list")
            (tmp_path / "two" / "metrics.jsonl").unlink()
            while "two" not in found["gone"]:
                found = await following("list")

    with_ui(tmp_path, body)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_a_page_with_other_rows_is_told_to_ask_again(tmp_path: Path) -> None:
    folder = _made(tmp_path / "run")
    write_metrics(folder, 20)

    async def body(client: Client) -> None:
        table = await client.get("/api/metrics", run="run")
        async with client.events(run="run", table=table["table"], after=20) as following:
            assert (await following("rows"))["steps"] == [20]
            sink = JsonlSink(folder / "metrics.jsonl", resume_step=5)
            sink.write(6, {"train/loss": 1.0})
            sink.close()
            status = await following("run")
            while status["lastStep"] != 6:
                status = await following("run")
            assert status["table"] != table["table"]
        again = await client.get("/api/metrics", run="run")
        assert (again["table"], again["steps"]) == (status["table"], [1, 2, 3, 4, 5, 6])

    with_ui(tmp_path, body)


def test_pages_are_bounded(tmp_path: Path) -> None:
    async def body(client: Client) -> None:
        async with asyncio.timeout(600):
            streams = [client.raw("/api/events") for _ in range(64)]
            answers = [await stream.__aenter__() for stream in streams]
            assert {answer.status for answer in answers} == {200}
            async with client.raw("/api/events") as refused:
                assert refused.status == 503
                assert (await refused.json())["error"]["code"] == "too_many_pages"
            for answer in answers:
                answer.close()

    with_ui(tmp_path, body)


def test_what_a_run_calls_itself_is_only_ever_text(tmp_path: Path) -> None:
    folder = _made(tmp_path / "<img src=x>")
    sink = JsonlSink(folder / "metrics.jsonl")
    sink.write(1, {HOSTILE.replace("\ud800", ""): 1.0, "train/loss": float("nan")})
    sink.close()
    (folder / "config.yaml").write_text(json.dumps({"run": {"name": HOSTILE[:60], "tags": [HOSTILE[:50]]}}))
    (folder / "supervisor.jsonl").write_text('{"time": "x", "event": "crash", "status": NaN, "tail": ["<b>"]}\n')
    row = '{"member": "<b>", "rating": NaN, "games": 1, "wins": 1, "draws": 0, "losses": 0, "win_rate": null}'
    (folder / "league.json").write_text(f'{{"step": 1, "members": [{row}]}}')
    write_ledger(folder, num_trained=1)

    async def body(client: Client) -> None:
        (run,) = await until_listed(client, 1)
        assert run["tags"] == [HOSTILE[:50]]
        async with client.raw("/api/run", run=run["id"]) as answer:
            assert answer.content_type == "application/json"
        found = await client.get("/api/run", run=run["id"])
        assert found["events"][0]["status"] is None
        assert found["league"]["members"][0]["rating"] is None
        table = await client.get("/api/metrics", run=run["id"], more=1)
        assert table["nonfinite"] == {"train/loss": [1]}
        assert "train/loss" not in table["columns"]

    with_ui(tmp_path, body)


def test_a_server_that_ends_leaves_no_thread(tmp_path: Path) -> None:
    write_metrics(_made(tmp_path / "run"), 3)
    before = threading.active_count()

    async def body(client: Client) -> None:
        await client.get("/api/run", run="run")

    with_ui(tmp_path, body)
    assert threading.active_count() <= before + 1  # asyncio's own, which Python keeps for the next loop
