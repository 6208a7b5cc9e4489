"""`forge plan`: the table, the JSON, the refusal, and that every configuration in apps/ can be planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from forge.cli import main
from forge.config import GRPOConfig, load
from forge.errors import ConfigError
from forge.memory import Card
from forge.memory.checking import check_memory
from forge.memory.constants import GIB
from forge.memory.fitting import changed_config

APPS = Path(__file__).parents[3] / "apps"
SMALL = (
    "model.preset=qwen3_0_6b",
    "training.max_seq_len=1024",
    "distributed.precision=bfloat16",
    "distributed.shard=1",
    "--gpu-memory",
    "24GB",
)
GOLDEN = """\
qwen3_0_6b: 596,049,920 parameters
1 GPU(s) of 23.64 GiB (GPU)

trainer, fullest while training (output layer), in GiB
  weights                      2.22  596 M of 596 M parameters x 4 bytes
  optimizer states             4.44  two of 4 bytes for each that is trained
  rotary tables                0.03  one for each layer
  CUDA context                 0.50  of the process
  gradients                    2.22  4 bytes for each weight trained
  gathered weights             1.11  all layers, 2 bytes for each weight
  activations                  1.40  1,024 tokens, 28 layers, checkpointing none
  output layer                 0.29  logits of 1,024 tokens
  output layer's gradient      0.87  summed in float32
  allocator slack              0.96  2.5% of what comes and goes, and idle blocks of the embedding's size
  peak                        14.04
  free                         9.60  of 23.64
"""
MADE_BY_APPS = {
    *("games/grpo.yaml", "tools/grpo.yaml", "coding/grpo.yaml", "critic/grpo.yaml", "grpo/ppo_tiny.yaml"),
    "grpo/curriculum_tiny.yaml",
    *("selfplay/kuhn/grpo.yaml", "selfplay/kuhn/league.yaml", "selfplay/tictactoe/grpo.yaml"),
    *("rlhf/tiny_reward_model.yaml", "rlhf/tiny_grpo.yaml", "sft/tiny_lora.yaml"),
    *("distill/tiny_offline.yaml", "distill/tiny_onpolicy.yaml"),
}
"""Configurations whose model a program makes first."""
SFT_GPUS = {"llama3_8b": ("80GB", "2"), "qwen3_8b": ("80GB", "2"), "qwen3_1_7b": ("40GB", "1")}
"""What fine-tuning is planned for: a GPU's memory, and how many there are."""
SMOLLM2: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "max_position_embeddings": 8192,
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "rms_norm_eps": 1e-05,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 49152,
}


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["plan", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_table_of_one_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *SMALL, "--kind", "sft")
    assert (code, err) == (0, "")
    assert out.startswith(GOLDEN)
    assert "\nIt fits.\n" in out
    assert "Largest training.microbatch_tokens that fits: " in out
    assert "Longest training.max_seq_len that fits, one sequence to a row: " in out


def test_json_has_every_moment(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, *SMALL, "--kind", "sft", "--json")
    found = json.loads(out)
    assert code == 0
    assert found["fits"] is True
    assert found["num_parameters"] == 596_049_920
    (gpu,) = found["gpus"]
    assert gpu["peak_bytes"] == max(moment["bytes"] for moment in gpu["moments"])
    for moment in gpu["moments"]:
        assert moment["bytes"] == sum(part["bytes"] for part in moment["parts"])
    assert found["largest"]["microbatch_tokens"] >= 1024


def test_what_does_not_fit_is_refused_with_words_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    words = [str(APPS / "grpo" / "qwen3_1_7b.yaml"), "--gpus", "1"]
    code, out, err = run(capsys, *words, "--gpu-memory", "40GB")
    assert code == 2
    assert "It does NOT fit." in out
    assert "MISSING" in out
    assert err.startswith("forge plan: the run does not fit into a GPU (trainer + generator): ")
    for field in ("path:", "value:", "rule:", "repair:"):
        assert f"  {field}" in err
    pasted = out.partition("the cheapest first:\n")[2].splitlines()[0].split()
    code, out, _ = run(capsys, *words, *pasted, "--gpu-memory", "40GB")
    assert code == 0
    assert "It fits." in out


def test_a_change_that_takes_more_gpus_says_so_and_advice_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(APPS / "grpo" / "qwen3_32b.yaml")
    code, out, err = run(capsys, path, "--gpu-memory", "24GB")
    assert code == 2
    assert out.startswith("qwen3_32b")
    assert "24 GPU(s) of" in out
    advice = out.partition("the cheapest first:\n")[2].splitlines()[0]
    assert "distributed.shard=64" in advice
    assert advice.endswith("  # on 68 GPUs instead of 24"), "a comment, which a shell leaves out"
    assert "repair: one of the changes listed above" in err
    assert "distributed.shard" not in err
    code, out, _ = run(capsys, path, "--gpu-memory", "24GB", "--json")
    found = json.loads(out)
    assert (found["num_gpus"], found["proposals_num_gpus"]) == (24, [68])
    error = refusal_of(path)
    assert str(error.repair).endswith("(on 68 GPUs instead of 24)"), "a run that is refused says it as well"


def refusal_of(path: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        check_memory(load(GRPOConfig, files=[path]), card=Card(24 * GIB))
    return caught.value


def test_proposals_are_in_the_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    path = APPS / "grpo" / "qwen3_1_7b.yaml"
    code, out, _ = run(capsys, str(path), "--gpu-memory", "40GB", "--gpus", "1", "--json")
    found = json.loads(out)
    assert (code, found["fits"]) == (2, False)
    assert found["proposals"]
    for words in found["proposals"]:
        changed_config(load(GRPOConfig, files=[path]), words)  # each is a configuration that can be


def test_too_few_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(APPS / "grpo" / "qwen3_1_7b_3gpu.yaml")
    code, out, err = run(capsys, path, "--gpu-memory", "80GB", "--gpus", "2")
    assert code == 2
    assert "It needs 3 GPUs, and there are 2." in out
    assert "the run needs 3 GPUs: 1 trainer, 1 generator, 1 reference" in err


def test_options_may_stand_between_the_words(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(APPS / "sft" / "qwen3_1_7b.yaml")
    code, out, _ = run(capsys, path, "--gpu-memory", "80GB", "training.max_seq_len=512", "--json", "run.seed=3")
    assert code == 0
    assert json.loads(out)["gpus"][0]["name"] == "trainer"


def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")  # no nvidia-smi


def test_a_gpu_is_asked_for_where_there_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_gpus(monkeypatch)
    for words in ([str(APPS / "sft" / "qwen3_1_7b.yaml")], ["model.preset=tiny", "--gpus", "2"]):
        code, out, err = run(capsys, *words)
        assert (code, out) == (2, "")
        assert "which GPU" in err
        assert "--gpu-memory 80GB" in err


def test_a_run_on_a_cpu_needs_no_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    without_gpus(monkeypatch)
    code, out, _ = run(capsys, "model.preset=tiny", "training.max_seq_len=128", "--kind", "grpo")
    assert code == 0
    assert "GPU" not in out
    assert "host memory" in out


@pytest.mark.parametrize(
    ("words", "path"),
    [
        (["model.preset=tiny", "--gpu-memory", "much"], "--gpu-memory"),
        (["model.preset=tiny", "--gpu-memory", "80GB", "--gpus", "0"], "--gpus"),
        (["no/such/file.yaml"], "no/such/file.yaml"),
        (["model.preset=tiny", "training.max_seq_len=none", "--kind", "sft"], "training.max_seq_len"),
        (["model.path=nowhere", "--gpu-memory", "80GB"], "model.path"),
    ],
)
def test_wrong_input_is_named(capsys: pytest.CaptureFixture[str], words: list[str], path: str) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert path in err


def configurations() -> list[Path]:
    return sorted(path for path in APPS.rglob("*.yaml") if "recorded" not in path.parts)


@pytest.mark.parametrize("path", configurations(), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_configuration_in_apps_can_be_planned(
    path: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is planned for what its head says it needs: GPUs of 80 GB. A model that no preset describes is laid down."""
    monkeypatch.chdir(tmp_path)
    without_gpus(monkeypatch)
    words = [str(path)]
    is_diagnosis = path.parent.name == "diagnosis"
    if is_diagnosis and path.stem != "sft":  # they change something about a healthy run, whose model is made first
        words = [str(path.with_name("healthy.yaml")), str(path), "~model.path", "model.preset=tiny"]
    if "smollm2" in path.name:
        folder = Path("models/smollm2-135m")
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(SMOLLM2))
    if path == APPS / "grpo" / "tiny.yaml":
        words += ["model.preset=tiny", "model.num_layers=2"]  # what `make quickstart` makes
    if path.relative_to(APPS).as_posix() in MADE_BY_APPS:
        words += ["~model.path", "model.preset=tiny"]  # the app makes its model by fine-tuning first
    if path.parent.name == "sft" and path.stem in SFT_GPUS:  # as many ranks as there are GPUs
        words += ["--gpus", SFT_GPUS[path.stem][1]]
    small = ("quickstart", "games", "tools", "coding", "critic", "kuhn", "tictactoe")
    is_small = "tiny" in path.name or path.parent.name in small or is_diagnosis
    code, out, err = run(capsys, *words, *(() if is_small else ("--gpu-memory", "80GB")))
    assert (code, err) == (0, "")
    assert "It fits." in out


def test_help_says_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for word in ("--gpu-memory", "--gpus", "--json", "example: forge plan"):
        assert word in text


def test_a_card_as_sold_has_a_little_less() -> None:
    assert Card(80 * GIB).usable == int(80 * GIB * 0.985)


@pytest.mark.parametrize("name", SFT_GPUS)
def test_fine_tuning_fits_the_gpus_that_its_file_names(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    size, count = SFT_GPUS[name]
    path = APPS / "sft" / f"{name}.yaml"
    said = {"1": "one GPU", "2": "two GPUs"}[count]
    assert f"on {said} of {size.removesuffix('GB')} GB" in path.read_text(encoding="utf-8").splitlines()[0]
    code, out, err = run(capsys, str(path), "--gpu-memory", size, "--gpus", count)
    assert (code, err) == (0, "")
    assert f"{count} of {count} GPU(s)" in out
    assert "It fits." in out


def test_accumulation_is_said_not_to_save_memory(capsys: pytest.CaptureFixture[str]) -> None:
    plain = run(capsys, *SMALL, "--kind", "sft")[1]
    words = ("training.batch_size=2", "training.gradient_accumulation_steps=8")
    code, out, _ = run(capsys, *SMALL, *words, "--kind", "sft")
    assert code == 0
    note = "Note: training.batch_size and training.gradient_accumulation_steps do not change the memory of a run: "
    assert out.startswith(plain)
    assert f"{note}training.microbatch_tokens does" in out
