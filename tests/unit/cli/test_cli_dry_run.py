"""`forge run --dry-run` and `forge config check`: what they accept the run accepts, and nothing is started."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from forge.cli import main
from forge.cli.dry_run import schema_of_script
from forge.config.command_line import MODULE_FOLDERS
from forge.errors import ConfigError

ROOT = Path(__file__).parents[3]
GRPO, SFT = str(ROOT / "apps" / "grpo" / "main.py"), str(ROOT / "apps" / "sft" / "main.py")
FIRST = """
run: {name: first}
model: {preset: tiny}
prompts: {sources: [{path: prompts.jsonl}]}
rewards: {functions: [{kind: number}]}
rollout: {batch_groups: 2, group_size: 4}
generator: {sampling: {max_tokens: 16}}
training: {max_steps: 20, max_seq_len: 128}
"""
EPISODE = """
episode: {kind: asking:ask, args: {most: 3}}
evaluation: {fraction: 0.25, reward: guessed}
"""
TUNE = """
model: {preset: tiny}
training: {max_seq_len: 128, batch_size: 2, gradient_accumulation_steps: 8}
data: {sources: [{path: train.jsonl}]}
"""
REWARD = "def half(prompt, completion):\n    return 0.5\n"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with data and configurations; what the command changes in this process is changed back."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["forge"])
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    monkeypatch.setenv(MODULE_FOLDERS, "")
    prompts = [{"prompt": f"What is {n} + 1?", "answer": str(n + 1)} for n in range(9)]
    Path("prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    talk = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}] for n in range(40)]
    Path("train.jsonl").write_text("".join(f"{json.dumps({'messages': turns})}\n" for turns in talk))
    Path("first.yaml").write_text(FIRST)
    Path("tune.yaml").write_text(TUNE)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(list(words))
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return code, captured.out, captured.err


def problems(text: str) -> list[str]:
    """The paths of the problems that were printed."""
    return [line.strip() for line in text.splitlines() if line.startswith("  ") and not line.startswith("   ")]


def test_a_run_of_reinforcement_learning_is_described_and_not_started(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(place.rglob("*"))
    code, out, err = run(capsys, "run", GRPO, "--config", "first.yaml", "--dry-run", "rollout.group_size=3")
    assert (code, err) == (0, "")
    facts = {line.split()[0]: " ".join(line.split()[1:]) for line in out.splitlines() if line.startswith("  ")}
    assert facts["schema"] == f"forge.config:GRPOConfig (named in {GRPO})"
    assert facts["run"] == "first, written to runs/first"
    assert facts["prompts"] == "9 to learn from: prompts.jsonl (plain)"
    assert facts["first"] == "prompts.jsonl:1: What is 0 + 1? -> 1"
    assert facts["last"] == "prompts.jsonl:9: What is 8 + 1? -> 9"
    assert facts["rewards"] == "number (number)"
    assert facts["steps"] == "20, each from 2 groups of 3 completions"
    assert facts["memory"].startswith("host: ")
    assert out.endswith("Nothing was started.\n")
    assert sorted(place.rglob("*")) == before


def test_a_run_of_episodes_is_described_by_its_program(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import forge\n@forge.episode\nasync def ask(task, agent, *, most=1):\n    return 0.0\n"
    Path("asking.py").write_text(program)
    same = "".join(json.dumps({"prompt": "Guess.", "answer": str(number)}) + "\n" for number in range(8))
    Path("prompts.jsonl").write_text(same)
    Path("first.yaml").write_text(FIRST.replace("rewards: {functions: [{kind: number}]}", EPISODE))
    code, out, _ = run(capsys, "run", GRPO, "--config", "first.yaml", "--dry-run")
    assert code == 0
    assert "episode     asking:ask(most=3), in 1 process(es)" in out
    assert "held out    2 prompts" in out
    assert "2 groups of 4 episodes" in out
    assert "rewards" not in out
    words = ("episode.args.most=1", "episode.args.least=1", "prompts.sources.0.path=none.jsonl")
    code, _, err = run(capsys, "run", GRPO, "--config", "first.yaml", "--dry-run", *words)
    assert code == 2
    assert problems(err) == ["episode.args", "none.jsonl"]


def test_fine_tuning_is_described_with_what_decides_its_memory(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "run", "--dry-run", "--nproc_per_node", "2", SFT, "--config", "tune.yaml")
    assert (code, err) == (0, "")
    for part in (
        f"forge.config:SFTConfig (named in {SFT})",
        "40 samples to train on: train.jsonl (messages)",
        'train.jsonl:1: {"messages": [{"role": "user", "content": "0?"}',
        "train.jsonl:40: ",
        "each of at most 16 rows of 128 tokens",
        "128 tokens on each rank (training.microbatch_tokens), which decides the memory",
        "2 rank(s) in float32",
    ):
        assert part in out


def test_all_problems_are_named_at_once(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "runs").write_text("not a folder")
    words = ["rewards.functions=[{kind: 'json:dmps'}]"]
    words += ["prompts.sources=[{path: absent.jsonl}, {path: gone.jsonl}]"]
    words += ["rollout.group_size=4000", "generator.tensor_parallel=2", "generator.sampling.max_tokens=128"]
    code, out, err = run(capsys, "run", GRPO, "--config", "first.yaml", *words, "model.path=absent", "--dry-run")
    assert (code, out) == (2, "")
    assert err.startswith("The run would not start. It has 7 problems:\n")
    expected = ["model.path", "rewards.functions[0].kind", "generator.tensor_parallel", "run.output_dir"]
    expected += ["absent.jsonl", "gone.jsonl", "rollout.group_size"]
    assert problems(err) == expected
    assert "did you mean `dumps`?" in err

    code, _, err = run(capsys, "config", "check", "tune.yaml", "data.sources=[{path: no.jsonl}]", "model.path=absent")
    assert code == 2
    assert problems(err) == ["model.path", "run.output_dir", "no.jsonl"]


@pytest.mark.parametrize(
    ("schema", "expected"),
    [("GRPOConfig", ["model", "rewards.functions", "prompts.sources"]), ("SFTConfig", ["model", "data.sources"])],
)
def test_an_empty_file_is_not_a_valid_run(schema: str, expected: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    Path("empty.yaml").write_text("")
    code, out, err = run(capsys, "config", "check", "--schema", f"forge.config:{schema}", "empty.yaml")
    assert (code, out) == (2, "")
    found = problems(err)
    assert [path.split(".")[0] if path.startswith("model") else path for path in found] == expected


def test_the_schema_is_found_by_the_sections(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "config", "check", "first.yaml")
    assert (code, err) == (0, "")
    assert "forge.config:GRPOConfig (by its sections: generator, prompts, rewards, rollout, training;" in out
    code, _, err = run(capsys, "config", "check", "first.yaml", "rollout.group_sise=3")
    assert code == 2
    assert err.startswith("The configuration has a problem:\n  rollout.group_sise\n")
    code, out, _ = run(capsys, "config", "show", "first.yaml", "--json")
    assert (code, json.loads(out)["rollout"]["group_size"]) == (0, 4)


def test_a_file_that_could_be_of_two_kinds_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    Path("vague.yaml").write_text("model: {preset: tiny}\ntraining: {max_seq_len: 64}\n")
    code, _, err = run(capsys, "config", "check", "vague.yaml")
    assert code == 2
    assert problems(err) == ["data.sources"]
    assert "SFTConfig (by its sections: training; GRPOConfig" in err
    assert "would fit as well; --schema names another)" in err


def test_keys_alone_are_not_called_a_valid_run(capsys: pytest.CaptureFixture[str]) -> None:
    Path("some.yaml").write_text("run: {seed: 4}\n")
    code, out, _ = run(capsys, "config", "check", "some.yaml")
    assert code == 0
    assert out.startswith("The keys are valid. Schema: forge.config:ForgeConfig (no section says")
    assert "Nothing else was checked" in out


@pytest.mark.parametrize(("module", "folder"), [("my_near_reward", "."), ("my_deep_reward", "deep/configs")])
def test_a_reward_is_found_beside_the_configuration_and_in_the_working_directory(
    place: Path, module: str, folder: str, capsys: pytest.CaptureFixture[str]
) -> None:
    where = place / folder
    where.mkdir(parents=True, exist_ok=True)
    (where / f"{module}.py").write_text(REWARD)
    config = where / "mine.yaml"
    config.write_text(FIRST.replace("{kind: number}", f"{{kind: {module}:half}}"))
    code, out, err = run(capsys, "run", GRPO, "--config", str(config), "--dry-run")
    assert (code, err) == (0, "")
    assert f"half ({module}:half)" in out
    assert os.environ[MODULE_FOLDERS].split(os.pathsep) == list(dict.fromkeys([str(where), str(place)]))
    assert run(capsys, "config", "check", str(config))[0] == 0
    tried = run(capsys, "rewards", "try", f"{module}:half", "--text", "x", "--config", str(config))
    assert tried[:2] == (0, "0.5\n")


def test_a_reward_that_rewards_try_does_not_find_the_run_does_not_find_either(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / "my_far_reward.py").write_text(REWARD)
    code, _, err = run(capsys, "rewards", "try", "my_far_reward:half", "--text", "x")
    assert code == 2
    assert "No module named 'my_far_reward'" in err
    words = ["--config", "first.yaml", "rewards.functions=[{kind: my_far_reward:half}]"]
    code, _, err = run(capsys, "run", GRPO, *words, "--dry-run")
    assert code == 2
    assert problems(err) == ["rewards.functions[0].kind"]
    assert "put it beside the script, beside the configuration, in the working directory" in err


def test_a_resume_without_a_checkpoint_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", SFT, "--config", "tune.yaml", "--resume", "--dry-run")
    assert code == 2
    assert problems(err) == [str(Path("runs/run/checkpoints"))]
    assert "There is no checkpoint" in err


def test_reinforcement_learning_is_not_started_once_per_rank(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", "--nproc_per_node", "2", GRPO, "--config", "first.yaml", "--dry-run")
    assert code == 2
    assert problems(err) == ["--nproc_per_node"]


def test_gpus_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code, _, err = run(capsys, "config", "check", "first.yaml", "distributed.with_gpus=true", "distributed.shard=1")
    assert code == 2
    assert problems(err) == ["distributed.with_gpus"]


# ---- The schema of a script


OWN = """
from pathlib import Path
from pydantic import Field
from forge.config import ConfigModel, SFTConfig, from_command_line

Path("started").touch()


class ExtraConfig(ConfigModel):
    word: str = "none"


class OwnConfig(SFTConfig):
    extra: ExtraConfig = Field(default_factory=ExtraConfig)


def main():
    config = from_command_line(OwnConfig)
    Path("started").touch()


main()
"""


def test_a_schema_that_the_script_defines_is_used_and_the_script_is_not_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("own.py").write_text(OWN)
    code, out, err = run(capsys, "run", "own.py", "--config", "tune.yaml", "extra.word=mine", "--dry-run")
    assert (code, err) == (0, "")
    assert " OwnConfig (named in own.py)" in out
    code, _, err = run(capsys, "run", "own.py", "--config", "tune.yaml", "extra.wort=mine", "--dry-run")
    assert code == 2
    assert "did you mean `extra.word`?" in err
    assert not Path("started").exists()


def test_a_schema_with_annotations_as_text_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    Path("own.py").write_text(f"from __future__ import annotations\n{OWN}")
    assert run(capsys, "run", "own.py", "--config", "tune.yaml", "extra.word=mine", "--dry-run")[0] == 0


@pytest.mark.parametrize(
    "text",
    [
        "from forge.config import load\nload(object)\n",
        "from forge.config import from_command_line\ndef main(schema):\n    from_command_line(schema)\n",
    ],
)
def test_a_script_that_does_not_name_its_schema_is_judged_by_its_sections(
    text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("other.py").write_text(text)
    code, out, err = run(capsys, "run", "other.py", "--config", "tune.yaml", "--dry-run")
    assert (code, err) == (0, "")
    assert "forge.config:SFTConfig (by its sections: data, training;" in out


def test_a_script_whose_imports_fail_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("broken.py").write_text("import a_module_that_is_not_there\nfrom_command_line(X)\n")
    code, _, err = run(capsys, "run", "broken.py", "--config", "tune.yaml", "--dry-run")
    assert code == 2
    assert err.startswith("forge run: the script cannot be run\n  path:   broken.py\n")
    assert "No module named 'a_module_that_is_not_there'" in err


def test_a_script_that_is_not_python_has_no_schema() -> None:
    Path("broken.py").write_text("def main(:\n")
    with pytest.raises(ConfigError, match="SyntaxError"):
        schema_of_script(Path("broken.py"))


def test_the_program_for_a_configuration_of_another_kind_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "run", GRPO, "--config", "tune.yaml", "--dry-run")
    assert code == 2
    assert "Is `forge run sft` the right program?" in err
