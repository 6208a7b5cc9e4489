"""The tutorials run as users follow them: their files, their commands, and what the pages say comes out."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from forge.observe import read_jsonl
from forge.observe.diagnosis import diagnose
from tutorial_pages import FOLDER, ROOT, commands, files, first_missing, follow, links, run

PAGES = sorted(path.stem for path in FOLDER.glob("*.md") if path.stem != "index")
DIAGNOSIS = ROOT / "apps" / "diagnosis"


def rewards(run_folder: Path) -> list[float]:
    lines = read_jsonl(run_folder / "metrics.jsonl")
    return [float(line.values["rollout/reward_mean"]) for line in lines if "train/loss" in line.values]


def test_every_tutorial_is_listed_and_tested() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    source = Path(__file__).read_text(encoding="utf-8")
    for page in PAGES:
        assert f"]({page}.md)" in index
        assert f'"{page}"' in source


@pytest.mark.parametrize("page", [*PAGES, "index"])
def test_the_links_of_a_page_lead_somewhere(page: str) -> None:
    assert [link for link in links(page) if not (FOLDER / link).is_file()] == []


def test_lines_are_compared_without_their_numbers() -> None:
    printed = ["a", "Step 3 | 0.25 of 1,000", "b  c"]
    assert first_missing(["Step 12 | 1e-5 of 7", "b c"], printed) is None
    assert first_missing(["Step 12 | none of 7"], printed) == "Step 12 | none of 7"
    assert first_missing(["b c", "a"], printed) == "a"
    progress = ["Evaluation at step 0 | reward 0.3 | 10 prompts", "step 5/15 | reward 0.5"]
    assert first_missing(["Evaluation at step 0 | reward 0.25", "Step 5 | Avg Reward: 0.75 | 1 s"], progress) is None
    assert first_missing(["Step 4 | Avg Reward: 0.75"], progress) == "Step 4 | Avg Reward: 0.75"
    assert first_missing(["Evaluation at step 5 | reward 0.25"], progress) == "Evaluation at step 5 | reward 0.25"


def test_first_rl_run(tmp_path: Path, leaves_nothing: None) -> None:
    follow("first_rl_run", tmp_path)
    found = rewards(tmp_path / "runs" / "first")
    assert len(found) == 20
    assert sum(found[:3]) / 3 < 0.4
    assert sum(found[-3:]) / 3 > 0.9
    assert (tmp_path / "runs" / "first" / "checkpoints" / "hf" / "config.json").is_file()
    assert diagnose(tmp_path / "runs" / "first").findings == ()


def test_custom_reward(tmp_path: Path, leaves_nothing: None) -> None:
    *_, parts = follow("custom_reward", tmp_path, files_of=("first_rl_run",))
    evens = [float(found) for found in re.findall(r"even (\d\.\d\d)", parts)]
    one_words = [float(found) for found in re.findall(r"one_word (\d\.\d\d)", parts)]
    assert evens[-1] > 0.9 > evens[0]
    assert one_words[-1] > one_words[0] + 0.1
    assert diagnose(tmp_path / "runs" / "even").findings == ()


def test_custom_loss(tmp_path: Path, leaves_nothing: None) -> None:
    _, proof, variant = follow("custom_loss", tmp_path, files_of=("first_rl_run",))
    assert "builtin and down_1 have the same rewards in every step: True" in proof
    assert "down_1 and down_0 have the same rewards in every step: False" in variant
    assert rewards(tmp_path / "runs" / "down_1")[-1] > 0.8
    assert diagnose(tmp_path / "runs" / "down_0").findings == ()


def test_custom_environment(tmp_path: Path, leaves_nothing: None) -> None:
    follow("custom_environment", tmp_path, files_of=("first_rl_run",))
    found = rewards(tmp_path / "runs" / "guess")
    assert found[0] < 0.2
    assert sum(found[-3:]) / 3 > 0.7
    assert diagnose(tmp_path / "runs" / "guess").findings == ()


def test_one_gpu_to_cluster(tmp_path: Path, held_port: Callable[[], int], leaves_nothing: None) -> None:
    ports = {"22222": str(held_port()), "22223": str(held_port())}
    printed = follow("one_gpu_to_cluster", tmp_path, files_of=("first_rl_run", "custom_loss"), changes=ports)
    same = re.findall(r"have the same rewards in every step: (\w+)", "".join(printed))
    assert same == ["True"] * 3
    hosts = (tmp_path / "runs" / "hosts" / "config.yaml").read_text(encoding="utf-8")
    assert all(port in hosts for port in ports.values())
    assert [name for name in ("one", "ahead", "hosts") if diagnose(tmp_path / "runs" / name).findings] == []


# ---- Diagnosing ------------------------------------------------------------------------------------------------------


def test_what_the_page_shows_of_recorded_runs_is_what_is_printed() -> None:
    shown = commands("diagnosing")
    assert len(shown) == 7
    for command in shown:
        printed = iter(run(command.script, ROOT).splitlines())
        for line in command.shown:
            assert line == "..." or line in printed, line
    assert files("diagnosing") == {}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the cheapest of the runs were made again."""
    folder = tmp_path_factory.mktemp("diagnosis")
    names = ("reward_hacking", "cut_off")
    run(f"{sys.executable} {DIAGNOSIS / 'record.py'} {' '.join(names)} --output again", folder)
    return folder


def test_a_reward_that_is_hacked_is_hacked_again(made: Path) -> None:
    folder = made / "again" / "reward_hacking"
    (found,) = diagnose(folder).findings
    assert found.name == "reward hacking"
    solved = diagnose(folder).run.solved()
    assert solved[0][1] > 0.1
    assert solved[-1][1] < 0.05
    assert rewards(folder)[-1] > 0.8
    last = max((folder / "rollouts").glob("step_*.jsonl")).read_text(encoding="utf-8").splitlines()
    assert not any(json.loads(line)["parts"]["right"] for line in last)


def test_completions_that_are_cut_off_teach_nothing_again(made: Path) -> None:
    (found,) = diagnose(made / "again" / "cut_off").findings
    assert found.name == "cut off before the answer"


def test_what_is_kept_of_a_run_makes_a_report(made: Path) -> None:
    from forge.observe.report import write_report

    report = write_report(made / "again" / "reward_hacking", output=made / "report.html")
    assert report.last_step == 40
    assert report.num_samples > 20
