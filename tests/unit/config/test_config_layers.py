"""Layers: which one wins, and who set what."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from pydantic import Field

from forge.config import ConfigModel, ForgeConfig, FrozenDict, explain, load, load_with_origins, preset_names

Write = Callable[[str, str], str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> str:
        (tmp_path / name).write_text(text)
        return str(tmp_path / name)

    return write_file


class OptimizerConfig(ConfigModel):
    lr: float = Field(default=1e-3, gt=0)
    betas: tuple[float, ...] = (0.9, 0.95)


class TaskConfig(ConfigModel):
    weight: int = Field(default=1, ge=1)
    level: int = 0


class TrainConfig(ForgeConfig):
    tasks: Mapping[str, TaskConfig] = Field(default_factory=FrozenDict)
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    steps: int = 10


def test_without_layers_the_schema_speaks() -> None:
    config = load(ForgeConfig)
    assert config == ForgeConfig()
    assert (config.run.output_dir, config.launcher.kind, config.launcher.bind) == (Path("runs"), "local", "127.0.0.1")


def test_later_files_win_key_by_key_and_lists_are_replaced(write: Write) -> None:
    first = write("a.yaml", "run: {name: a, seed: 1}\nlauncher: {hosts: ['tcp://h:1', 'tcp://h:2']}\n")
    second = write("b.yaml", "run: {seed: 2}\nlauncher: {hosts: ['tcp://h:3']}\n")
    config = load(ForgeConfig, files=[first, second])
    assert (config.run.name, config.run.seed) == ("a", 2)
    assert config.launcher.hosts == ("tcp://h:3",)
    assert load(ForgeConfig, files=[second, first]).run.seed == 1


def test_overrides_win_over_files_and_later_over_earlier(write: Write) -> None:
    file = write("a.yaml", "run: {name: a, seed: 1}\n")
    config = load(ForgeConfig, files=[file], overrides=["run.seed=2", "run.seed=3"])
    assert (config.run.name, config.run.seed) == ("a", 3)


def test_defaults_of_the_application_lie_beneath_preset_and_files(write: Write) -> None:
    defaults = {"model": {"preset": "tiny", "num_layers": 99}, "run": {"seed": 5, "output_dir": Path("out")}}
    config = load(ForgeConfig, files=[write("a.yaml", "run: {name: x}\n")], defaults=defaults)
    assert (config.model.num_layers, config.run.seed, config.run.output_dir) == (4, 5, Path("out"))
    assert defaults["model"] == {"preset": "tiny", "num_layers": 99}


def test_the_preset_lies_beneath_the_users_keys(write: Write) -> None:
    file = write("a.yaml", "model: {preset: qwen3_1_7b, num_layers: 2}\n")
    model = load(ForgeConfig, files=[file]).model
    assert (model.num_layers, model.hidden_size, model.tie_embeddings) == (2, 2048, True)


@pytest.mark.parametrize("where", ["override", "mapping override", "later file"])
def test_the_preset_named_last_replaces_the_preset_and_keeps_the_users_keys(write: Write, where: str) -> None:
    files = [write("a.yaml", "model: {preset: qwen3_30b_a3b, num_layers: 2}\n")]
    overrides = {"override": ["model.preset=qwen3_8b"], "mapping override": ["model={preset: qwen3_8b}"]}.get(where, [])
    if where == "later file":
        files.append(write("b.yaml", "model: {preset: qwen3_8b}\n"))
    model = load(ForgeConfig, files=files, overrides=overrides).model
    assert (model.preset, model.num_layers, model.hidden_size) == ("qwen3_8b", 2, 4096)
    assert model.num_experts is None, "a key of the first preset is left"


@pytest.mark.parametrize("override", ["~model.preset", "model.preset=null", "model.preset=", "~model"])
def test_a_preset_can_be_taken_back(write: Write, override: str) -> None:
    model = load(ForgeConfig, files=[write("a.yaml", "model: {preset: tiny}\n")], overrides=[override]).model
    assert (model.preset, model.num_layers) == (None, None)


def test_a_key_that_only_the_preset_set_can_be_removed() -> None:
    model = load(ForgeConfig, overrides=["model.preset=tiny", "~model.num_layers"]).model
    assert (model.num_layers, model.hidden_size) == (None, 128)


def test_every_preset_loads_and_says_what_it_is() -> None:
    assert preset_names() == tuple(sorted([*FACTS, "tiny"]))
    for name in preset_names():
        model = load(ForgeConfig, overrides=[f"model.preset={name}"]).model
        facts = model.model_dump(exclude={"preset", "name", "path", "hf_repo", "rope_scaling", "head_precision"})
        unset = {key for key, value in facts.items() if value is None}
        experts = {"num_experts", "num_experts_per_token", "expert_intermediate_size"}
        assert unset == (set() if name == "qwen3_30b_a3b" else experts), name
        assert (model.hf_repo is None) == (name == "tiny")


# layers, width, feed-forward, heads, kv heads, tied; from the config.json of each repository
FACTS = {
    "qwen3_0_6b": (28, 1024, 3072, 16, 8, True),
    "qwen3_1_7b": (28, 2048, 6144, 16, 8, True),
    "qwen3_4b": (36, 2560, 9728, 32, 8, True),
    "qwen3_8b": (36, 4096, 12288, 32, 8, False),
    "qwen3_32b": (64, 5120, 25600, 64, 8, False),
    "qwen3_30b_a3b": (48, 2048, 6144, 32, 4, False),
    "llama3_1_8b": (32, 4096, 14336, 32, 8, False),
    "llama3_2_1b": (16, 2048, 8192, 32, 8, True),
    "qwen2_5_1_5b": (28, 1536, 8960, 12, 2, True),
}


@pytest.mark.parametrize("name", FACTS)
def test_presets_hold_the_published_facts(name: str) -> None:
    m = load(ForgeConfig, overrides=[f"model.preset={name}"]).model
    shape = (m.num_layers, m.hidden_size, m.intermediate_size, m.num_heads, m.num_kv_heads, m.tie_embeddings)
    assert shape == FACTS[name]
    width = 64 if name == "llama3_2_1b" else 128
    assert (m.head_dim, m.vocab_size) == (width, 128256 if name.startswith("llama") else 151936)


def test_applications_add_sections(write: Write) -> None:
    file = write("a.yaml", "optimizer: {lr: 1e-4, betas: [0.5, 1]}\nsteps: 3\nrun: {seed: 1}\n")
    config = load(TrainConfig, files=[file], overrides=["tasks.math.weight=2"])
    assert config.optimizer == OptimizerConfig(lr=1e-4, betas=(0.5, 1.0))
    assert (config.steps, config.run.seed, config.tasks["math"].weight) == (3, 1, 2)


def test_a_schema_without_a_model_has_no_presets() -> None:
    assert load(OptimizerConfig, overrides=["lr=0.5"]).lr == 0.5


def test_origins_name_layer_file_and_line(write: Write) -> None:
    file = write("a.yaml", "# comment\nrun:\n  name: a\nlauncher:\n  hosts: [tcp://h:1, tcp://h:2]\n")
    loaded = load_with_origins(
        ForgeConfig,
        files=[file],
        overrides=["model.preset=tiny", "launcher.hosts.1=tcp://h:9"],
        defaults={"run": {"seed": 3}},
    )
    found = {path: str(origin) for path, origin in loaded.origins.items()}
    assert loaded.config.launcher.hosts == ("tcp://h:1", "tcp://h:9")
    assert found["run.name"] == f"{file}:3"
    assert found["run.seed"] == "defaults of the application"
    assert found["run.output_dir"] == "default"
    assert found["model.preset"] == "override model.preset=tiny"
    assert found["model.num_layers"] == "preset tiny"
    assert (found["launcher.hosts.0"], found["launcher.hosts.1"]) == (
        f"{file}:5",
        "override launcher.hosts.1=tcp://h:9",
    )
    lines = [" ".join(line.split()) for line in explain(loaded).splitlines()]
    assert lines[0] == f"run.name: a # {file}:3"
    assert len(lines) == len(loaded.origins)


def test_an_explanation_has_one_line_for_each_value() -> None:
    loaded = load_with_origins(OptimizerConfig)
    assert explain(loaded) == "lr: 0.001      # default\nbetas.0: 0.9   # default\nbetas.1: 0.95  # default\n"
    loaded_actor = load_with_origins(
        ForgeConfig, overrides=[f'launcher.kubernetes.claims={{x: "/a\\nb", y: "/{"long " * 40}"}}']
    )
    assert len(explain(loaded_actor).splitlines()) == len(loaded_actor.origins)


def test_a_replaced_value_forgets_its_origin(write: Write) -> None:
    file = write("a.yaml", "tasks: {math: {weight: 2}}\n")
    loaded = load_with_origins(TrainConfig, files=[file], overrides=["~tasks.math", "tasks.math.level=2"])
    assert loaded.config.tasks["math"].weight == 1
    assert str(loaded.origins["tasks.math.weight"]) == "default"


def test_importing_the_package_loads_neither_torch_nor_monarch() -> None:
    code = "import sys, forge.config; print(sorted({'torch', 'monarch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
