"""The pure parts of the GPU benchmarks: budgets, the split of a step, memory, the search for a length, and tables."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
PROGRAMS = ("grpo_gpu", "context_gpu", "sync_gpu", "gpu_table", "decode_gpu")
NAMES = ("children", "context", "memory", "ours", "plan", "report", "sync", "trl")


@pytest.fixture(scope="module")
def bench() -> Iterator[SimpleNamespace]:
    """The programs and their parts, as they see each other."""
    before, environment = set(sys.modules), dict(os.environ)
    sys.path.insert(0, str(BENCHMARKS))
    try:
        parts = {name: importlib.import_module(f"harness.gpu_{name}") for name in NAMES}
        programs = {name: importlib.import_module(name) for name in PROGRAMS}
        yield SimpleNamespace(**parts, **programs)
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in set(sys.modules) - before:
            if name.partition(".")[0] in ("harness", *PROGRAMS):
                del sys.modules[name]
        os.environ.clear()
        os.environ.update(environment)


# ---- Time


def test_a_budget_counts_down_and_cuts(bench: SimpleNamespace) -> None:
    now = [100.0]
    budget = bench.children.Budget(2.0, clock=lambda: now[0])
    assert budget.left_s == 120.0
    assert budget.has(120.0)
    assert not budget.has(120.1)
    now[0] += 90
    assert budget.cut(300.0) == 30.0
    assert budget.cut(10.0) == 10.0
    assert budget.left_minutes == 0.5
    now[0] += 100
    assert budget.left_s == 0.0
    endless = bench.children.Budget(None)
    assert endless.has(1e9)
    assert endless.cut(7.0) == 7.0
    assert endless.left_minutes is None


def test_intervals_begin_with_the_end_of_the_last_warm_step(bench: SimpleNamespace) -> None:
    steps = [{"ended": value} for value in (10.0, 14.0, 17.0, 21.0)]
    assert bench.report.intervals(steps, num_warm=1) == [4.0, 3.0, 4.0]
    assert bench.report.intervals(steps, num_warm=2) == [3.0, 4.0]
    assert bench.report.intervals(steps[:1], num_warm=1) == []
    with pytest.raises(ValueError, match="num_warm is 0"):
        bench.report.intervals(steps, num_warm=0)


def test_the_parts_of_our_step_add_up_and_sleep_is_other(bench: SimpleNamespace) -> None:
    times = {"waiting": 1.0, "generating": 4.0, "training": 6.0, "syncing": 0.5, "other": 0.5, "step": 12.0}
    split = bench.report.split_ours(times, engine_s=5.0)
    assert split == {"generation": 5.0, "training": 5.0, "sync": 0.5, "other": 1.5}
    assert sum(split.values()) == times["step"]


def test_the_parts_of_trls_step_add_up(bench: SimpleNamespace) -> None:
    parts = {"rollout": 9.0, "generation_and_sync": 6.0, "sync": 1.0, "scoring": 2.5}
    split = bench.report.split_trl(parts, step_s=20.0)
    assert split == {"generation": 5.0, "training": 11.0, "sync": 1.0, "other": 3.0}
    without = bench.report.split_trl({"rollout": 9.0, "generation_and_sync": 6.0}, step_s=20.0)
    assert without["sync"] == 0.0
    assert without["generation"] == 6.0


# ---- Operations and figures


def plan_of(bench: SimpleNamespace, **changed: Any) -> Any:
    return replace(bench.plan.QUICK, **changed)


def test_operations_of_whole_samples_are_those_of_each_sample(bench: SimpleNamespace) -> None:
    from forge.models.sizes import flops_per_token, mean_context

    plan = plan_of(bench, num_prompts=3, group_size=4, prompt_tokens=10, max_tokens=6)
    facts = bench.plan.facts_of("tiny")
    lengths = [16] * 12
    whole = sum(lengths) * flops_per_token(facts, mean_context(lengths))
    assert bench.report.training_flops(facts, plan, prompt_once=False) == pytest.approx(whole)
    once = bench.report.training_flops(facts, plan, prompt_once=True)
    attended = 10 * 11 / 2 + 4 * (6 * 10 + 6 * 7 / 2)
    assert once == pytest.approx(3 * (10 + 24) * flops_per_token(facts, attended / 34))
    assert once < whole


def our_events() -> list[dict[str, Any]]:
    steps = [
        {"event": "step", "step": number, "ended": 10.0 * number, "samples": 8, "tokens": 64, "engine_s": 4.0}
        | {"mean_apart": 0.1 * number, "max_apart": float(number), "outside": 0.0, "num_tokens": 10 * number}
        for number in (1, 2, 3)
    ]
    times = {"waiting": 0.0, "generating": 4.0, "training": 5.0, "syncing": 0.5, "other": 0.5, "step": 10.0}
    told = [
        {"event": "times", "step": number, "staleness_mean": 0.5, "staleness_max": 1, "times": times, "sync": {}}
        for number in (1, 2, 3)
    ]
    return [{"event": "started", "seconds": 7.0}, *steps, {"event": "trainer", "memory_gib": 3.0}, *told]


def outcome_of(events: list[dict[str, Any]], status: str = "ok") -> dict[str, Any]:
    return {"status": status, "why": "", "events": events, "peak_bytes": 5_000_000_000, "start_bytes": 1_000_000_000}


def test_figures_of_our_side(bench: SimpleNamespace) -> None:
    plan = plan_of(bench, num_steps=2)
    facts = bench.plan.facts_of("tiny")
    found = bench.report.side_figures(outcome_of(our_events()), plan, facts=facts, peak_flops=1e12)
    assert found["samples_per_s"] == pytest.approx(16 / 20)
    assert found["step_s"] == 10.0
    assert found["split"] == {"generation": 4.0, "training": 4.0, "sync": 0.5, "other": 1.5}
    assert found["peak_gb"] == 4.0
    assert found["torch_peak_gib"] == 3.0
    assert found["waited_tokens_per_s"] == pytest.approx(64 / 4)
    assert found["tokens_per_s"] == pytest.approx(6.4)
    assert found["mfu"] == pytest.approx(bench.report.training_flops(facts, plan, prompt_once=False) / 4.0 / 1e12)
    assert found["mfu_prompt_once"] < found["mfu"]
    assert (found["staleness_mean"], found["staleness_max"]) == (0.5, 1)
    assert found["mean_apart"] == pytest.approx((0.2 * 20 + 0.3 * 30) / 50)  # by tokens, without the warm step
    assert found["max_apart"] == 3.0


def test_figures_of_trls_side_and_of_one_that_was_cut_short(bench: SimpleNamespace) -> None:
    plan, facts = plan_of(bench, num_steps=2), bench.plan.facts_of("tiny")
    parts = {"rollout": 9.0, "generation_and_sync": 6.0, "sync": 1.0}
    steps = [
        {"event": "step", "step": number, "ended": 20.0 * number, "samples": 8, "tokens": 64, "parts": parts}
        for number in (1, 2, 3)
    ]
    found = bench.report.side_figures(outcome_of(steps), plan, facts=facts, peak_flops=None)
    assert found["split"]["training"] == 11.0
    assert "mfu" not in found
    fast = bench.report.side_figures(outcome_of(steps), plan, facts=facts, peak_flops=1e12)
    assert fast["mfu"] == pytest.approx(bench.report.training_flops(facts, plan, prompt_once=False) / 11.0 / 1e12)
    assert "mfu_prompt_once" not in fast
    assert "mean_apart" not in found
    assert found["staleness_mean"] is None
    late = bench.report.side_figures(outcome_of(steps[:1], "time"), plan, facts=facts, peak_flops=None)
    assert late["status"] == "time"
    assert "samples_per_s" not in late
    shown = bench.report.speed_table({"trl-vllm": late}) + bench.report.use_table({"trl-vllm": late})
    assert "| trl-vllm |" in shown


def test_our_best_is_held_against_trls_best(bench: SimpleNamespace) -> None:
    def side(rate: float, peak: float, status: str = "ok") -> dict[str, Any]:
        return {"status": status, "why": "", "samples_per_s": rate, "peak_gb": peak}

    sides = {
        "native-shared": side(8.0, 90.0),
        "vllm-turns": side(9.0, 100.0, "time"),
        "trl-vllm": side(4.0, 100.0),
        "trl-vllm-awake": side(99.0, 1.0, "failed"),
        "trl-transformers": side(1.0, 50.0),
    }
    rows = {row["what"]: row for row in bench.report.goal_rows(sides)}
    speed = rows["vllm-turns / trl-vllm, samples a second"]
    assert (speed["ratio"], speed["goal"], speed["met"]) == (2.25, 2.0, True)
    memory = rows["vllm-turns / trl-vllm, peak memory"]
    assert (memory["ratio"], memory["met"]) == (1.0, True)
    assert rows["native-shared / trl-vllm, samples a second"]["goal"] is None
    assert bench.report.goal_rows({"native-shared": side(8.0, 9.0)}) == []


def test_the_fastest_probe_that_fits_is_taken(bench: SimpleNamespace) -> None:
    tried = [
        {"rows": 4, "fits": True, "seconds_a_sample": 0.3, "allocated_gib": 40.0},
        {"rows": 8, "fits": True, "seconds_a_sample": 0.2, "allocated_gib": 130.0},
        {"rows": 16, "fits": False},
    ]
    assert bench.report.best_probe(tried)["rows"] == 8
    assert bench.report.best_probe(tried, most_gib=120.0)["rows"] == 4
    assert bench.report.best_probe(tried[2:]) is None


# ---- The search for the longest sample


@pytest.mark.parametrize(("fixed", "per_token"), [(30e9, 120e3), (7e9, 2e6), (1e9, 20e3)])
def test_the_search_ends_near_the_longest_that_fits(bench: SimpleNamespace, fixed: float, per_token: float) -> None:
    total = 140e9
    truth = (total - fixed) / per_token
    tries: list[Any] = []
    while (length := bench.context.next_length(tries, total_bytes=total, least=16384)) is not None:
        assert length not in [each.length for each in tries]
        fits = length <= truth
        tries.append(
            bench.context.Try(length, "trained" if fits else "full", fixed + per_token * length if fits else 0)
        )
        assert len(tries) <= 9
    longest, end = bench.context.longest_of(tries), bench.context.end_of(tries)
    assert truth / 1.06 < longest.length <= truth
    assert end.length <= longest.length * 1.06


def test_the_search_ends_where_time_does(bench: SimpleNamespace) -> None:
    tries = [bench.context.Try(1024, "trained", 1e9), bench.context.Try(2048, "time")]
    assert bench.context.next_length(tries, total_bytes=1e12, least=1024) == 1536
    tries += [bench.context.Try(1792, "time"), bench.context.Try(1536, "trained", 1.1e9)]
    assert bench.context.next_length(tries, total_bytes=1e12, least=1024) is None
    assert bench.context.next_length(tries, total_bytes=1e12, least=1024, step=64) == 1664
    never = [bench.context.Try(512, "full"), bench.context.Try(256, "full")]
    assert bench.context.next_length(never, total_bytes=1e12, least=512) is None


def test_how_a_try_ended(bench: SimpleNamespace) -> None:
    outcome, judged = bench.children.Outcome, bench.context_gpu.judged
    trained = outcome("ok", [{"event": "trained", "seconds": 2.0}], peak_bytes=9, start_bytes=1)
    assert judged(64, trained) == bench.context.Try(64, "trained", 8.0, 2.0)
    assert judged(64, outcome("ok", [{"event": "full"}])).outcome == "full"
    assert judged(64, outcome("failed", why="RuntimeError: CUDA error: out of memory")).outcome == "full"
    assert judged(64, outcome("time", seconds=9.0)).outcome == "time"
    assert judged(64, outcome("failed", why="ValueError: no")) is None


# ---- Sides as processes


def test_a_side_tells_as_it_goes(bench: SimpleNamespace, tmp_path: Path) -> None:
    word = "from harness.gpu_plan import say; say('step', step=1, parts={'a': 1}); say('done')"
    done = bench.children.run_side("good", [sys.executable, "-c", word], folder=tmp_path, device="cpu", limit_s=60)
    assert (done.status, done.why) == ("ok", "")
    assert done.all("step") == [{"event": "step", "step": 1, "parts": {"a": 1}}]
    assert done.last("done") == {"event": "done"}
    assert done.last("missing") is None
    assert json.loads(json.dumps(done.summary()))["status"] == "ok"
    assert bench.children.shown(done.events[0]) == "step: step 1"


def test_a_side_that_fails_says_why_and_ends_whatever_its_threads_do(bench: SimpleNamespace, tmp_path: Path) -> None:
    lines = (
        "import threading",
        "from harness.gpu_plan import do_and_end",
        "threading.Thread(target=threading.Event().wait).start()",
        "def work(): raise ValueError('no such thing')",
        "do_and_end(work)",
    )
    command = [sys.executable, "-c", "\n".join(lines)]
    failed = bench.children.run_side("bad", command, folder=tmp_path, device="cpu", limit_s=60)
    assert failed.status == "failed"
    assert bench.report.first_line(failed.why) == "ValueError: no such thing"


def test_a_side_whose_time_is_over_is_ended(bench: SimpleNamespace, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import signal; signal.pause()"]
    late = bench.children.run_side("late", command, folder=tmp_path, device="cpu", limit_s=0.0)
    assert late.status == "time"
    assert late.why == "ended after 0 s"


def test_nothing_of_a_side_is_left(bench: SimpleNamespace) -> None:
    """Neither its child that has a session of its own, nor one that does not listen to SIGTERM."""
    child = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
    parent = (
        "import subprocess, sys, signal\n"
        f"one = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE, start_new_session=True)\n"
        "one.stdout.readline(); print(one.pid, flush=True); signal.pause()"
    )
    process = bench.children.start([sys.executable, "-c", parent], output=subprocess.PIPE, variables=os.environ)
    assert process.stdout is not None
    with process.stdout as told:
        pid = int(told.readline())
        try:
            assert {process.pid, pid} <= set(bench.memory.family(process.pid))
            assert bench.memory.resident_bytes([process.pid, pid]) > 1e6
            bench.children.end_session(process, grace_s=0.5)
            assert bench.memory.family(process.pid) == []
            assert not bench.children.lives(pid)
        finally:
            for each in (pid, process.pid):
                if bench.children.lives(each):
                    os.kill(each, signal.SIGKILL)
            process.wait()


def test_a_line_that_is_being_written_is_left_for_later(bench: SimpleNamespace, tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_text('{"event": "a"}\n{"event": "b"')
    assert bench.children.read_events(path) == [{"event": "a"}]


def test_the_peak_is_the_highest_that_was_seen(bench: SimpleNamespace) -> None:
    values = iter([3, 9, 4])
    peak = bench.memory.Peak(lambda: next(values))
    peak.look()
    peak.look()
    assert (peak.start, peak.highest) == (3, 9)
    seen: list[int] = []
    with bench.memory.watched(lambda: len(seen), every_s=1000) as watched:
        seen += [1, 2]
    assert (watched.start, watched.highest) == (0, 2)  # it looks once more at the end
    assert bench.memory.settled(lambda: 5, below=5) == 5
    assert bench.memory.settled(lambda: 6, below=5, within_s=0.0) == 6


# ---- What sides are given


def test_every_side_of_ours_is_a_valid_configuration(bench: SimpleNamespace, tmp_path: Path) -> None:
    from forge.config import GRPOConfig, load

    for device in ("cpu", "cuda"):
        plan = replace(bench.plan.Plan(), device=device, settings=("training.compile=true",))
        for side in bench.ours.SIDES:
            config = load(GRPOConfig, overrides=bench.ours.settings_of(plan, tmp_path, side))
            assert config.rollout.batch_groups * config.rollout.group_size == 512
            ahead = {"native-shared-ahead": 1, "native-shared-ahead2": 2, "native-shared-ahead3": 3}
            assert config.rollout.staleness == ({"native-beside": 1, "vllm-beside": 1} | ahead).get(side, 0)
            assert config.generator.engine == side.partition("-")[0]
            assert config.distributed.precision == "bfloat16"
            assert config.training.compile
            assert config.training.microbatch_tokens == 2 * (512 + 8 * 1024)
    pure = bench.ours.settings_of(replace(plan, precision="pure"), tmp_path, "native-shared")
    assert "distributed.precision=bfloat16_pure" in pure


def test_a_plan_reads_what_it_wrote(bench: SimpleNamespace, tmp_path: Path) -> None:
    plan = plan_of(bench, settings=("a=1",), trl=("beta=0.5", 'optim="adafactor"'))
    assert bench.plan.Plan.read(plan.write(tmp_path / "plan.json")) == plan
    assert bench.trl.given(plan) == {"beta": 0.5, "optim": "adafactor"}
    assert bench.plan.resized(plan, num_prompts=None, group_size=2).num_samples == plan.num_prompts * 2


class Completed:
    """Takes requests as vLLM's `LLM.generate` and our generators do, and notes how long completions were to be."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def generate(self, prompts: list[Any], *, sampling_params: list[Any]) -> None:
        self.lengths = [each.max_tokens for each in sampling_params]
        assert [each.min_tokens for each in sampling_params] == self.lengths
        assert len(prompts) == len(self.lengths)


class Policy:
    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def generate(self, prompt: Any, *, sampling: Any) -> list[Any]:
        from forge.types import Completion

        self.lengths.append(sampling.max_tokens)
        fields: dict[str, Any] = {"logprobs": (0.0,), "full_logprobs": (0.0,), "text": "", "finish_reason": "length"}
        return [Completion(prompt_ids=(1,), token_ids=(2,), **fields)]


def test_both_sides_give_the_completions_of_a_step_the_same_lengths(bench: SimpleNamespace) -> None:
    from forge.config import Sampling

    plan = plan_of(bench, tail=1.0, tail_median=20, max_tokens=100, num_prompts=3, group_size=4)
    llm, policy = Completed(), Policy()
    bench.trl.vary_lengths(llm, plan)
    varied = bench.ours.VariedLengths(policy, plan)
    sampling_params = SimpleNamespace(clone=lambda: SimpleNamespace())
    seen = []

    async def step() -> None:
        policy.lengths.clear()
        await asyncio.gather(*(varied.generate(object(), sampling=Sampling(n=4, max_tokens=100)) for _ in range(3)))

    for _ in range(2):
        llm.generate([object()] * 12, sampling_params)
        asyncio.run(step())
        assert policy.lengths == llm.lengths
        seen.append(tuple(llm.lengths))
    assert seen[0] != seen[1]
    assert len(set(seen[0])) > 6
    assert all(1 <= length <= 100 for length in seen[0])


def test_warm_steps_of_trl_can_be_short(bench: SimpleNamespace) -> None:
    plan = plan_of(bench, max_tokens=50, warm_tokens=7, num_warm=2)
    assert [set(bench.trl.lengths_of_step(plan, step, num=8)) for step in range(3)] == [{7}, {7}, {50}]
    assert set(bench.trl.lengths_of_step(replace(plan, warm_tokens=0), 0, num=8)) == {50}


def test_steps_are_shown_and_so_is_one_that_failed(bench: SimpleNamespace) -> None:
    def step(ms: float, *, apart: float = 0.0, is_finite: bool = True) -> dict[str, Any]:
        return {"ms": dict.fromkeys(bench.decode_gpu.OWN, ms), "apart": apart, "finite": is_finite}

    steps = {"modules": {"failed": "an error"}, "fused": step(7.0, apart=0.01)}
    found = {"variants": [{"cache": "auto", "steps": steps}]}
    shown = bench.decode_gpu.show(found)
    assert "an error" in shown
    assert "7.00" in shown


def test_rewards_differ_within_a_group(bench: SimpleNamespace) -> None:
    assert bench.plan.spread([96]) == 1.0
    assert bench.plan.spread([1, 2, 3]) != bench.plan.spread([1, 2, 4])
    assert bench.trl.spread_reward(completion_ids=[[1], [97]], prompts=[]) == [1 / 96, 0.0]
    assert bench.plan.reward(None, SimpleNamespace(token_ids=(48,))) == 0.5


def test_how_far_sampler_and_trainer_are_apart(bench: SimpleNamespace) -> None:
    import torch

    from forge.types import Batch, Sample

    fields = {"old_logprobs": torch.tensor([0.0, 0.0, -1.0, -2.0])}
    batch = Batch.of([Sample(torch.arange(4), torch.tensor([0.0, 0.0, 1.0, 1.0]), fields)])
    found = bench.ours.mismatch(batch, [torch.tensor([9.0, 9.0, -1.05, -1.5])])
    assert found["mean_apart"] == pytest.approx(0.275)
    assert found["max_apart"] == pytest.approx(0.5)
    assert found["outside"] == 0.5  # exp(-0.05) lies within, exp(0.5) does not
    assert found["num_tokens"] == 2


# ---- Weights


def test_figures_of_a_way(bench: SimpleNamespace) -> None:
    base = {"event": "round", "publish_s": 0.002, "take_s": 0.003, "token_s": 0.1, "stall_s": 0.001, "update_s": 0.003}
    rounds = [
        base | {"with_proof": proof, "way_s": way} for proof, way in ((True, 0.02), (False, 0.004), (False, 0.006))
    ]
    outcome = outcome_of([*rounds, {"event": "published", "version": 1, "num_bytes": 10_000_000}])
    side = bench.sync_gpu.figures(outcome, num_bytes=1)
    assert side["plain"]["way_s"] == pytest.approx(0.005)
    assert side["plain"]["gbps"] == pytest.approx(2.0)
    assert side["proven"]["way_s"] == 0.02
    row = bench.sync_gpu.goal_row({"ipc": side})
    assert (row["ratio"], row["met"]) == (pytest.approx(5.0), True)
    assert bench.sync_gpu.goal_row({"shared": side}) is None
    found = {"plan": {"shape": "tiny"}, "num_bytes": 10_000_000, "goal": row, "sides": {"ipc": side}}
    copies = {"on_device_s": 0.001, "to_host_s": 0.01, "from_host_s": 0.01}
    shown = bench.sync_gpu.report({**found, "copies": copies})
    assert "| one copy on the device | 1.00 | 10 |" in shown
    assert "| ipc | no | 2.00 | 3.00 | 5.00 | 1.00 | 100.00 | 2.0 |" in shown
    assert "< 10.0: met" in shown


# ---- The whole table


def test_stages_get_their_own_time_and_more_where_there_is_more(bench: SimpleNamespace) -> None:
    shares = bench.gpu_table.shares
    assert shares(["grpo", "sync"], None) == {"grpo": 9.0, "sync": 3.5}
    assert shares(["grpo", "sync"], 5.0) == {"grpo": 9.0, "sync": 3.5}
    assert shares(["grpo", "sync"], 25.0) == {"grpo": 18.0, "sync": 7.0}


def test_a_stage_gets_the_options_that_it_knows(bench: SimpleNamespace) -> None:
    words = ["--trl-python", "/x/python", "--folder", "/f", "--give", "grpo:--steps 2", "--give", "sync:--rounds 3"]
    chosen = bench.gpu_table.parse_arguments(words)
    command = bench.gpu_table.command_of("grpo", chosen, answer=Path("/a.json"), minutes=4.0)
    assert " ".join(command[2:]) == (
        "--minutes 4.00 --folder /f --shape qwen3_1_7b --trl-python /x/python --steps 2 --json /a.json"
    )
    shown = bench.gpu_table.shown_command(command)
    assert shown == "python benchmarks/grpo_gpu.py --minutes 4.00 --shape qwen3_1_7b --steps 2"
    other = bench.gpu_table.command_of("store", chosen, answer=Path("/a.json"), minutes=4.0)
    assert other[2:] == ["--json", "/a.json"]
    with pytest.raises(SystemExit):
        bench.gpu_table.parse_arguments(["--give", "--steps 2"])


def test_tables_are_taken_from_what_was_printed(bench: SimpleNamespace) -> None:
    printed = 'noise\nthe shape\n\n| a |\n| --- |\n| 1 |\n\n{"json": 1}\n| b |\n| --- |\nthe end\n'
    assert bench.gpu_table.markdown_of(printed) == "the shape\n\n| a |\n| --- |\n| 1 |\n\n| b |\n| --- |"
    assert bench.gpu_table.markdown_of("x 1\ny 2") == "```text\nx 1\ny 2\n```"


def test_what_does_not_fit_is_left_out_and_said(bench: SimpleNamespace, tmp_path: Path) -> None:
    markdown, written = tmp_path / "t.md", tmp_path / "t.json"
    written.write_text(json.dumps({"stages": {"sync": {"status": "ok", "printed": "| x |", "command": "python s"}}}))
    words = [
        "--device",
        "cpu",
        "--minutes",
        "0.1",
        "--stages",
        "grpo",
        "--json",
        str(written),
        "--markdown",
        str(markdown),
    ]
    bench.gpu_table.measure(bench.gpu_table.parse_arguments(words), tmp_path)
    found = json.loads(written.read_text())["stages"]
    assert found["grpo"]["status"] == "skipped"
    assert list(found) == ["sync", "grpo"]  # what was there is kept
    page = markdown.read_text()
    assert "Not measured: 0.0 minutes were left, and it needs 2.5." in page
    assert "```bash\npython s\n```\n\n| x |" in page
