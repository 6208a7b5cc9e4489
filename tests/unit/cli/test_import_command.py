"""`forge import`: from typical files of TRL, verl and TitanRL to a configuration that `forge config check` accepts."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.config import GRPOConfig, load
from forge.config.yaml_text import read_yaml

TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: data.jsonl
reward_funcs: [accuracy_reward]
output_dir: runs/gsm8k
learning_rate: 1.0e-6
lr_scheduler_type: constant_with_warmup
warmup_steps: 5
max_steps: 200
per_device_train_batch_size: 8
gradient_accumulation_steps: 4
num_generations: 8
max_completion_length: 64
max_prompt_length: 64
beta: 0.001
bf16: false
report_to: none
sync_ref_model: true
torch_empty_cache_steps: 4
numeration: 3
"""
VERL = """
set -x
python3 -m verl.trainer.main_ppo \\
    algorithm.adv_estimator=grpo \\
    data.train_files=data.jsonl \\
    data.train_batch_size=8 \\
    data.max_prompt_length=64 \\
    data.max_response_length=64 \\
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \\
    actor_rollout_ref.actor.optim.lr=1e-6 \\
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.actor.use_kl_loss=True \\
    actor_rollout_ref.actor.fsdp_config.dtype=fp32 \\
    actor_rollout_ref.rollout.name=vllm \\
    actor_rollout_ref.rollout.n=4 \\
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \\
    trainer.logger=console \\
    trainer.n_gpus_per_node=1 \\
    trainer.total_epochs=1 $@
"""
TITANRL = """
def rl_mine():
    return Controller.Config(
        model_spec=model_registry("0.6B", attn_backend="varlen"),
        hf_assets_path="models/Qwen3-0.6B",
        async_loop=AsyncLoopConfig(
            num_training_steps=4,
            target_offpolicy_steps=1,
            batcher=Batcher.Config(batch=BatchConfig(local_batch_size=1, seq_len=128)),
        ),
        rollouter=MathRollouter.Config(rubric=Rubric.Config(reward_fns=[RewardRight.Config()])),
        renderer=RendererConfig(name="qwen3"),
        trainer=PolicyTrainer.Config(
            optimizer=default_adamw(lr=1e-6),
            lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2),
            parallelism=ParallelismConfig(data_parallel_shard_degree=1),
            training=TrainingConfig(mixed_precision_param="float32"),
            loss=DAPOLoss.Config(ratio_clip_high=0.28),
        ),
        generator=VLLMGenerator.Config(sampling=SamplingConfig(temperature=1.0, top_p=1.0, max_tokens=64)),
    )
"""
SFT = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: talks.jsonl
packing: true
max_length: 128
num_train_epochs: 2
bf16: false
output_dir: runs/sft
"""
FILES = {"trl": ("grpo.yaml", TRL), "verl": ("run.sh", VERL), "titanrl": ("config_registry.py", TITANRL)}
FILLED = {
    "trl": ["model.path=tiny"],
    "verl": [
        "model.path=tiny",
        "rewards.functions=[{kind: number}]",
        "generator.engine=native",
        "generator.precision=null",
    ],
    "titanrl": [
        "model.path=tiny",
        "~model.preset",
        "prompts.sources=[{path: data.jsonl}]",
        "rewards.functions=[{kind: number}]",
        "generator.engine=native",
        "generator.precision=null",
    ],
}
"""What the reports ask for; and the engine that runs here, on a CPU."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory with a tiny model and a few prompts."""
    from forge.models.tiny import make_tiny

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    make_tiny(tmp_path / "tiny")
    records = [{"prompt": f"What is {number} + 1?", "answer": str(number + 1)} for number in range(8)]
    solved = [{**record, "solution": record["answer"]} for record in records]
    Path("data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in solved))
    talks = [
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": str(n)}]} for n in range(8)
    ]
    Path("talks.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    for name, text in [*FILES.values(), ("sft.yaml", SFT)]:
        Path(name).write_text(text, encoding="utf-8")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    """Run `forge` and return what it printed, on standard output, or on standard error where it failed."""
    assert main(list(words)) == code
    printed = capsys.readouterr()
    return printed.err if code else printed.out


@pytest.mark.parametrize("project", FILES)
def test_what_is_converted_is_a_run_once_it_is_filled_in(project: str, capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "import", project, FILES[project][0], "--output", "mine.yaml")
    said = run(capsys, "config", "check", "mine.yaml", *FILLED[project])
    assert said.startswith("The configuration is valid, and the run would start:\n")


def test_a_converted_fine_tuning_is_a_run_too(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "import", "trl", "sft.yaml", "--output", "mine.yaml")
    assert "8 samples" in run(capsys, "config", "check", "mine.yaml", "model.path=tiny")


@pytest.mark.parametrize("project", FILES)
def test_until_then_the_check_names_only_what_the_report_asks_for(
    project: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "import", project, FILES[project][0], "--output", "mine.yaml")
    asked = json.loads(run(capsys, "import", project, FILES[project][0], "--json"))["todo"]
    left = [word for word in FILLED[project] if word.startswith("generator.")]
    problems = run(capsys, "config", "check", "mine.yaml", *left, code=2)
    named = {line.strip() for line in problems.splitlines() if line.startswith("  ") and not line.startswith("   ")}
    paths = {each["path"] for each in asked} | {"model.path"}  # a folder that is not on this machine
    assert named
    assert {path for path in named if not path.startswith(tuple(paths))} == set()


def test_the_report_has_three_parts_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "import", "trl", "grpo.yaml", "--output", "mine.yaml")
    lines = said.splitlines()
    assert lines[0] == "grpo.yaml: TRL 1.16.0 -> GRPOConfig"
    headings = [line.partition(":")[0] for line in lines if line and not line.startswith(" ")]
    assert headings[1:6] == ["Maps", "Differs", "No counterpart", "Unknown keys, not converted", "To fill in"]
    maps, differs, none = (said[said.index(part) :] for part in ("Maps", "Differs", "No counterpart"))
    assert "  max_steps: 200 -> training.max_steps: 200\n" in maps.partition("\nDiffers")[0]
    assert "  adam_beta2: 0.999 (default) -> training.beta2: 0.999\n" in maps.partition("\nDiffers")[0]
    assert "  (always) -> rollout.no_signal: keep\n" in differs.partition("\nNo counterpart")[0]
    assert "  sync_ref_model: true\n      the reference does not change" in none
    line = TRL.splitlines().index("numeration: 3") + 1
    assert f"  numeration: 3  (grpo.yaml:{line})\n" in none
    assert lines[-2:] == [
        "Check it:  forge config check mine.yaml",
        "Run it:    forge run grpo --config mine.yaml",
    ]


def test_without_an_output_everything_printed_is_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "import", "trl", "grpo.yaml")
    assert said.startswith("# grpo.yaml: TRL 1.16.0 -> GRPOConfig\n#\n# Maps: ")
    Path("printed.yaml").write_text(said)
    run(capsys, "import", "trl", "grpo.yaml", "--output", "mine.yaml")
    assert load(GRPOConfig, files=["printed.yaml"]) == load(GRPOConfig, files=["mine.yaml"])


def test_the_file_says_where_it_is_from_and_what_is_left(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "import", "trl", "grpo.yaml", "--output", "mine.yaml")
    first, second, third, *_ = Path("mine.yaml").read_text().splitlines()
    assert first == "# From grpo.yaml (TRL 1.16.0), by `forge import`."
    assert (second, third[:16]) == ("# To fill in:", "#   model.path: ")


def test_json_has_the_configuration_and_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Any] = json.loads(run(capsys, "import", "trl", "grpo.yaml", "--json", "--num-processes", "2"))
    assert (found["project"], found["version"], found["kind"], found["source"]) == (
        "trl",
        "1.16.0",
        "grpo",
        "grpo.yaml",
    )
    assert found["config"]["rollout"]["batch_groups"] == 8
    assert {"theirs", "given", "ours", "note"} == set(found["maps"][0])
    assert [each["key"] for each in found["unknown"]] == ["numeration"]
    assert any(row["theirs"] == {"torch_empty_cache_steps": 4} for row in found["none"])


def test_a_file_is_not_replaced_unless_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text("kept")
    said = run(capsys, "import", "trl", "grpo.yaml", "--output", "mine.yaml", code=2)
    assert "path:   mine.yaml" in said
    assert "--overwrite" in said
    assert Path("mine.yaml").read_text() == "kept"
    run(capsys, "import", "trl", "grpo.yaml", "--output", "mine.yaml", "--overwrite")
    assert read_yaml(Path("mine.yaml").read_text(), source="mine.yaml").data["placement"] == "shared"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trl", "gone.yaml"], "path:   gone.yaml"),
        (["trl", "run.sh"], "trl grpo --config FILE"),
        (["verl", "grpo.yaml"], "use `forge import trl`"),
        (["trl", "grpo.yaml", "--kind", "ppo"], "one of grpo, rloo, sft, dpo, kto, reward"),
        (["titanrl", "config_registry.py", "--config", "gone"], "one of rl_mine"),
        (["trl", "grpo.yaml", "--output", "gone/mine.yaml"], "path:   gone/mine.yaml"),
    ],
)
def test_wrong_input_ends_with_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in run(capsys, "import", *words, code=2)


@pytest.mark.parametrize("words", [["openrlhf", "a.yaml"], ["trl"], ["trl", "a.yaml", "--num-processes", "0"], []])
def test_a_wrong_command_line_ends_with_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["import", *words])
    assert ended.value.code == 2


def test_help_names_the_forms_that_are_read(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["import", "trl", "--help"])
    assert "GRPOConfig" in capsys.readouterr().out
