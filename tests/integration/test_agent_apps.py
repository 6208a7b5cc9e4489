"""The agents' applications: their rules, and a few steps of each on a model of random weights."""

from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from forge.config import GRPOConfig, SFTConfig, load
from forge.envs.check import check_env
from forge.envs.episode import EpisodeRun, run_episode
from forge.loops.evaluation import Evaluation
from forge.loops.grpo import GRPOResult
from forge.models.tiny import make_tiny
from forge.models.tokenizer import ChatTokenizer
from forge.types import Task
from grpo_runs import episodes, metrics, train_here
from scripted_policy import END, ScriptedPolicy, state_of

APPS = Path(__file__).parents[2] / "apps"
PROGRAMS = {"games": "treasure", "tools": "boxes", "coding": "functions"}


@pytest.fixture
def program(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the application that a test names."""
    monkeypatch.syspath_prepend(str(APPS / request.param))
    return importlib.import_module(PROGRAMS[request.param])


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    folder = tmp_path_factory.mktemp("tiny") / "model"
    make_tiny(folder, num_layers=1, hidden_size=32, intermediate_size=32)
    return ChatTokenizer.load(folder)


def tasks(folder: Path, name: str) -> Iterator[Task]:
    for number, line in enumerate((folder / name).read_text().splitlines()):
        record = json.loads(line)
        messages = tuple(record.pop("messages"))
        yield Task(f"{name}:{number}", messages, answer=record.pop("answer", None), metadata=record)


def play(episode: Any, codec: ChatTokenizer, task: Task, answer: Callable[[str], str]) -> EpisodeRun:
    policy = ScriptedPolicy(codec, lambda text: answer(text) + END)
    return asyncio.run(run_episode(episode, state_of(policy, task=task, tool_format="json")))


@pytest.mark.parametrize(("app", "program"), [(app, app) for app in PROGRAMS], indirect=["program"])
def test_an_application_runs_a_few_steps(app: str, program: ModuleType, tmp_path: Path) -> None:
    files = program.write_files(tmp_path / "task", seed=3)
    config = load(
        GRPOConfig,
        files=[APPS / app / "grpo.yaml"],
        overrides=[
            *("model.path=null", "model.preset=tiny", "model.num_layers=1", "run.seed=3", "record.rollouts=all"),
            *(f"run.output_dir={tmp_path}", f"prompts.sources.0.path={files}/prompts.jsonl", "record.report=false"),
            *("rollout.batch_groups=2", "rollout.group_size=2", "rollout.no_signal=keep", "training.max_steps=2"),
            *(
                f"evaluation.sources.0.path={files}/heldout.jsonl",
                "evaluation.max_prompts=2",
                "training.warmup_steps=0",
            ),
        ],
    )
    result = train_here(config)
    assert result.step == 2
    assert result.first_evaluation is not None
    assert result.first_evaluation.num_prompts == 2
    made = [each for each in episodes(config) if each["outcome"] == "trained"]
    assert len(made) == 8
    assert {name for each in made for name in each["parts"]} == {"games": {"illegal"}}.get(app, {"reward"})
    turns = metrics(config, "episode/num_turns")
    assert turns == {"games": [1.0, 1.0], "tools": [1.0, 1.0], "coding": [2.0, 2.0]}[app]  # nothing but noise


@pytest.mark.parametrize(("app", "program"), [(app, app) for app in PROGRAMS], indirect=["program"])
def test_the_files_are_the_same_for_a_seed_and_held_out_tasks_are_not_trained_on(
    app: str, program: ModuleType, tmp_path: Path
) -> None:
    first, again, other = (program.write_files(tmp_path / name, seed=int(name[0])) for name in ("1a", "1b", "2"))
    names = ("demonstrations.jsonl", "prompts.jsonl", "heldout.jsonl")
    assert [(first / name).read_bytes() for name in names] == [(again / name).read_bytes() for name in names]
    assert (first / "heldout.jsonl").read_bytes() != (other / "heldout.jsonl").read_bytes()
    opened = {name: {task.messages[0]["content"] for task in tasks(first, name)} for name in names}
    assert not opened["heldout.jsonl"] & (opened["prompts.jsonl"] | opened["demonstrations.jsonl"])
    sft = load(SFTConfig, files=[APPS / app / "sft.yaml"])
    lengths = [len(json.loads(line)["messages"]) for line in (first / names[0]).read_text().splitlines()]
    assert len(lengths) >= sft.training.batch_size * (sft.training.max_steps or 0) // 2


@pytest.mark.parametrize(("app", "program"), [(app, app) for app in PROGRAMS], indirect=["program"])
def test_both_stages_find_their_files(
    app: str, program: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(APPS))
    warm_start = importlib.import_module("warm_start")
    tuned: list[SFTConfig] = []

    async def run_sft(config: SFTConfig) -> Any:
        tuned.append(config)
        assert Path(str(config.data.sources[0].path)).is_file()
        (tmp_path / config.run.name / "checkpoints" / "hf").mkdir(parents=True)
        return SimpleNamespace(is_stopped=False)

    async def run_grpo(config: GRPOConfig) -> Any:
        assert Path(str(config.model.path)).is_dir()
        assert all(Path(str(each.sources[0].path)).is_file() for each in (config.prompts, config.evaluation))
        evaluations = [Evaluation(4, solved, solved, {1: solved}, 6.0) for solved in (0.25, 0.75)]
        return GRPOResult(config.training.max_steps, 0.5, *evaluations, is_stopped=False, export=None, report=None)

    monkeypatch.setattr(warm_start, "run_sft", run_sft)
    monkeypatch.setattr(warm_start, "run_grpo", run_grpo)
    command = ["main.py", "--seed", "7", "--output", str(tmp_path), "training.max_steps=3"]
    for _ in range(2):  # the second time with the model of the first
        monkeypatch.setattr(sys, "argv", command)
        warm_start.main(APPS / app, program.write_files)
        out = capsys.readouterr().out
        assert "Held-out success: 25.0% -> 75.0% of 4 tasks never seen" in out
        assert "3 steps" in out
    assert [config.run.seed for config in tuned] == [7]
    monkeypatch.setattr(sys, "argv", [*command[:-1], "training.max_stepz=3"])
    with pytest.raises(SystemExit) as error:
        warm_start.main(APPS / app, program.write_files)
    assert error.value.code == 2
    assert "max_steps" in capsys.readouterr().err


@pytest.mark.parametrize(("app", "program"), [(app, app) for app in PROGRAMS], indirect=["program"])
def test_an_oracle_solves_every_task_and_doing_nothing_none(app: str, program: ModuleType, tmp_path: Path) -> None:
    episode = {"games": "hunt", "tools": "look", "coding": "repair"}[app]
    chosen = list(tasks(program.write_files(tmp_path), "heldout.jsonl"))[:2]
    report = asyncio.run(check_env(getattr(program, episode), chosen, oracle=program.oracle, grace_s=60.0))
    assert report.is_ok, [check for check in report.checks if check.status != "pass"]
    assert {check.name: check.status for check in report.checks}["oracle"] == "pass"


@pytest.mark.parametrize("program", ["games"], indirect=True)
def test_the_treasure_is_found_by_walking_to_it(program: ModuleType, codec: ChatTokenizer, tmp_path: Path) -> None:
    def towards(text: str) -> str:
        return re.findall(r"\d (\w+)", text)[-1]

    for task in list(tasks(program.write_files(tmp_path), "heldout.jsonl"))[:10]:
        done = play(program.hunt, codec, task, towards)
        steps = program.distance(task.metadata["way"])
        assert len(done.turns) == steps
        assert done.score.parts["found"] == 1.0
        assert done.score.parts["closer"] == pytest.approx(0.2 * steps)
        assert done.turn_rewards[0] == pytest.approx(0.2)
    silent = play(program.hunt, codec, task, lambda text: "stay")
    assert (len(silent.turns), dict(silent.score.parts)) == (1, {"illegal": -1.0})
    opposite = {"up": "down", "down": "up", "left": "right", "right": "left"}
    away = play(program.hunt, codec, task, lambda text: opposite[towards(text)])
    assert (len(away.turns), away.score.parts["found"]) == (5, 0.0)
    assert away.score.reward == pytest.approx(-1.0)
    final_only = play(program.hunt.with_args({"shaping": 0}), codec, task, towards)
    assert dict(final_only.score.parts) == {"found": 1.0}


@pytest.mark.parametrize("program", ["tools"], indirect=True)
def test_only_the_right_box_has_the_answer(program: ModuleType, codec: ChatTokenizer, tmp_path: Path) -> None:
    def opens(which: int) -> Callable[[str], str]:
        def answer(text: str) -> str:
            found = re.search(r"tool\n(.*?)<", text, re.DOTALL)
            boxes = re.search(r"at (\d) and (\d).*the (\w+)\?", text)
            assert boxes is not None
            asked = ("first", "last").index(boxes[3])
            return f"It is {found[1]}." if found else str(program.call(int(boxes[1 + (asked + which) % 2]))["content"])

        return answer

    task = next(iter(tasks(program.write_files(tmp_path), "heldout.jsonl")))
    right, wrong = play(program.look, codec, task, opens(0)), play(program.look, codec, task, opens(1))
    assert (right.score.reward, wrong.score.reward) == (1.0, 0.0)
    assert right.counts.num_tool_calls == 1
    assert play(program.look, codec, task, lambda text: "I do not know").score.reward == 0.0
    stuck = play(program.look, codec, task, lambda text: program.call(99)["content"])
    assert (stuck.outcome, stuck.score.reward, stuck.counts.tool_errors["raised"]) == ("turn_limit", 0.0, 2)


@pytest.mark.parametrize("program", ["coding"], indirect=True)
def test_a_reply_of_the_sandbox_decides_the_repair(program: ModuleType, codec: ChatTokenizer, tmp_path: Path) -> None:
    def repaired(text: str) -> str:
        k = int(re.findall(r"and (\d+)", text)[0])
        sign = "*" if "too small" in text else "-" if "too large" in text else "+"
        return str(program.written(sign, k))

    program._known.clear()
    for task in list(tasks(program.write_files(tmp_path), "heldout.jsonl"))[:3]:  # one of each operator
        done = play(program.repair, codec, task, repaired)
        assert done.score.reward == 1.0
    assert len(program._known) == 5
    broken = play(program.repair, codec, task, lambda text: "def f(x) return x")
    assert (broken.score.reward, len(broken.turns)) == (0.0, 2)
    assert "It failed." in str(broken.turns[1].messages)
