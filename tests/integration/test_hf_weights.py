"""Weights of real transformers models, into layouts over real ranks and out again, bit for bit.

Run as a program this file is one rank; the fixtures start two or four of them, which go through all cases and write
down what they found.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from forge.config import ModelConfig
from forge.errors import CheckpointError, ForgeError, ModelError
from forge.models.weight_names import weight_map
from forge.models.weights import load_hf
from forge.models.weights_out import export_hf
from hf_state import to_ours
from parameter_tree import tree

LIMIT_S = 600
FACTS = {"num_layers": 2, "hidden_size": 24, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8, "vocab_size": 67}
MIXTURE = {"num_experts": 4, "num_experts_per_token": 2, "expert_intermediate_size": 11}
CONFIGS = {
    "qwen3_tied": ModelConfig(family="qwen3", intermediate_size=45, tie_embeddings=True, **FACTS),
    "qwen3": ModelConfig(family="qwen3", intermediate_size=45, tie_embeddings=False, **FACTS),
    "qwen2": ModelConfig(family="qwen2", intermediate_size=45, tie_embeddings=False, **FACTS),
    "llama": ModelConfig(family="llama", intermediate_size=45, tie_embeddings=False, **FACTS),
    "qwen3_moe": ModelConfig(family="qwen3_moe", tie_embeddings=False, **MIXTURE, **FACTS),
    "qwen3_moe_fused": ModelConfig(family="qwen3_moe", tie_embeddings=False, **MIXTURE, **FACTS),
}
"""Sizes are odd on purpose: shards over two ranks are not all equal."""

# The ranks' side.


def ones(config: ModelConfig, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    return tree(config, fill=1.0, dtype=dtype)


def split_tensors(module: nn.Module, mesh: DeviceMesh, only: str = "", *, dim: int | None = None) -> nn.Module:
    """As tensor and expert parallelism lay parameters out: split along `dim`, or along one after the other."""
    count = 0
    done: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            if id(parameter) not in done and parameter.ndim > 1 and only in name:
                placement = Shard(count % parameter.ndim if dim is None else dim)
                done[id(parameter)] = nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement]))
                count += 1
            if id(parameter) in done:
                owner.register_parameter(name, done[id(parameter)])
    return module


def shard_layers(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in module.layers.children():
        fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def shard_within_experts(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As where there are more ranks than experts: FSDP splits each expert, along a dimension that is even."""

    def even(parameter: nn.Parameter) -> Shard:
        return Shard(1 if parameter.shape[1] % 2 == 0 else 2)

    for layer in module.layers.children():
        fully_shard(layer.moe.routed_experts.inner_experts, mesh=mesh, shard_placement_fn=even)
    return shard_layers(module, mesh)


def stage(module: nn.Module, config: ModelConfig) -> nn.Module:
    """This rank's part of a pipeline with a layer on each of two ranks."""
    rank = dist.get_rank()
    delattr(module.layers, str(1 - rank))
    if rank == 0:
        del module.norm
        del module.lm_head
    else:
        del module.tok_embeddings
        if config.tie_embeddings:
            module.lm_head.weight = nn.Parameter(torch.ones(67, 24))
    return module


def stage_sharded(module: nn.Module, config: ModelConfig) -> nn.Module:
    """A pipeline of two stages, each over a mesh of two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    first = mesh.get_coordinate()[0] == 0
    delattr(module.layers, "1" if first else "0")
    for name in ("norm", "lm_head") if first else ("tok_embeddings",):
        delattr(module, name)
    return shard_layers(module, mesh["dp"])


def unsharded(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """As between forward and backward: modules show whole parameters."""
    shard_layers(module, mesh)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.unshard()
    return module


def two_by_two(kind: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", kind))


def fsdp_over_tensors(module: nn.Module, only: str = "", *, dim: int | None = None) -> nn.Module:
    mesh = two_by_two("tp")
    return shard_layers(split_tensors(module, mesh["tp"], only, dim=dim), mesh["dp"])


Layout = Callable[[nn.Module, ModelConfig], nn.Module]


def line() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("x",))


LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "plain": lambda module, config: module,
        "fsdp": lambda module, config: shard_layers(module, line()),
        "unsharded": lambda module, config: unsharded(module, line()),
        "tensors": lambda module, config: split_tensors(module, line()),
        "pipeline": stage,
    },
    4: {
        "fsdp": lambda module, config: shard_layers(module, line()),
        "hsdp": lambda module, config: shard_layers(module, two_by_two("shard")),
        "fsdp_rows": lambda module, config: fsdp_over_tensors(module, dim=0),
        "fsdp_columns": lambda module, config: fsdp_over_tensors(module),
        "pipeline_fsdp": stage_sharded,
    },
}
MIXTURE_LAYOUTS: dict[int, dict[str, Layout]] = {
    2: {
        "experts": lambda module, config: split_tensors(module, line(), "_E", dim=0),
        "experts_by_rows": lambda module, config: split_tensors(module, line(), "_E", dim=1),
        "fsdp_within_experts": lambda module, config: shard_within_experts(module, line()),
    },
    4: {"fsdp_over_experts": lambda module, config: fsdp_over_tensors(module, "_E", dim=0)},
}


def cases(world: int) -> list[tuple[str, str]]:
    if world == 2:
        pairs = [(family, layout) for family in CONFIGS for layout in LAYOUTS[2]]
    else:
        pairs = [("qwen3", layout) for layout in LAYOUTS[4]] + [("qwen3_tied", "fsdp_rows")]
    return pairs + [(family, layout) for family in CONFIGS if "moe" in family for layout in MIXTURE_LAYOUTS[world]]


def run_case(folder: Path, family: str, layout: str) -> dict[str, Any]:
    """Load, compare with the files, and write again."""
    config = CONFIGS[family]
    world = dist.get_world_size()
    source = folder / "models" / family
    dtype = torch.bfloat16 if family == "llama" else torch.float32
    part = {**LAYOUTS[world], **MIXTURE_LAYOUTS[world]}[layout](ones(config, dtype=dtype), config)
    report = load_hf([part], source, config, max_read_bytes=1000)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    files: dict[str, Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        files.update(load_file(file))
    expected = to_ours(files, config)
    expected.setdefault("lm_head.weight", expected["tok_embeddings.weight"])
    wrong = []
    for name, parameter in part.named_parameters():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        if not torch.equal(whole, expected[name]):
            wrong.append(name)
    out = folder / f"out{world}" / f"{family}-{layout}"
    export_hf([part], out, config, max_shard_bytes=10_000, finish=lambda made: finish(source, made))
    total = sum(tensor.numel() * tensor.element_size() for tensor in files.values())
    return {"wrong": wrong, "bytes": report.num_bytes, "largest": report.largest_bytes, "total": total}


def finish(source: Path, made: Path) -> None:
    shutil.copy(source / "config.json", made)


def run_failures(folder: Path) -> dict[str, Any]:
    """What goes wrong on one rank is raised on both, and nobody waits for ever."""
    config = CONFIGS["qwen3"]
    rank = dist.get_rank()
    found: dict[str, Any] = {}

    def attempt(name: str, part: nn.Module, **options: Any) -> None:
        try:
            export_hf([part], folder / "failed" / name, config, **options)
        except ForgeError as error:
            found[name] = [type(error).__name__, str(error)]
        dist.barrier()
        left = sorted(path.name for path in (folder / "failed").glob(f"*{name}*"))
        found[name].append(left)

    odd = stage(ones(config), config)
    if rank == 1:
        odd.register_parameter("odd", nn.Parameter(torch.ones(2)))
    attempt("parameter", odd)

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # writing more raises OSError
    attempt("space", stage(ones(config), config))
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    attempt("finish", stage(ones(config), config), finish=lambda made: shutil.copy(made / "absent", made / "copy"))
    return found


def main(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting{world}"
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timedelta(seconds=LIMIT_S)
    )
    found: dict[str, Any] = {}
    status = 0
    try:
        for family, layout in cases(world):
            found[f"{family}-{layout}"] = run_case(folder, family, layout)
        if world == 2:
            found["failures"] = run_failures(folder)
    except Exception:  # noqa: BLE001  (the test reports it)
        found["traceback"] = traceback.format_exc()
        status = 1
    (folder / f"found{world}-{rank}.json").write_text(json.dumps(found))
    if status == 0:
        dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(status)


def die_while_writing(target: Path) -> None:
    """Replace a folder, and be killed when everything is written but the folder has not got its name."""
    config = CONFIGS["qwen3"]
    die = signal.SIGKILL
    export_hf([ones(config)], target, config, overwrite=True, finish=lambda made: os.kill(os.getpid(), die))


# The tests' side.


def hugging_face_model(family: str) -> Any:
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    config = CONFIGS[family]
    facts: dict[str, Any] = {
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
    }
    if config.family == "llama":
        model: Any = LlamaForCausalLM(LlamaConfig(intermediate_size=45, **facts))
    elif config.family == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(intermediate_size=45, **facts))
    elif config.family == "qwen3":
        model = Qwen3ForCausalLM(Qwen3Config(intermediate_size=45, **facts))
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 11}
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**experts, **facts))
    generator = torch.Generator().manual_seed(len(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.bfloat16() if family == "llama" else model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models of every family, in several files each, but for the one whose experts are fused."""
    root = tmp_path_factory.mktemp("weights")
    (root / "failed").mkdir()
    for family in CONFIGS:
        model = hugging_face_model(family)
        where = root / "models" / family
        if family == "qwen3_moe_fused":
            model.config.save_pretrained(where)
            save_file(
                {name: tensor.contiguous() for name, tensor in model.state_dict().items()}, where / "model.safetensors"
            )
        else:
            model.save_pretrained(where, max_shard_size="10KB")
            assert len(list(where.glob("*.safetensors"))) > 2
    return root


def environment_of_ranks() -> dict[str, str]:
    """This file runs itself, and what it shares with other tests is in tests/support."""
    folders = [str(Path(__file__).parents[1] / "support"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(folder for folder in folders if folder)
    return {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def outcomes(folder: Path, world: int) -> list[dict[str, Any]]:
    environment = environment_of_ranks()
    logs = [folder / f"log{world}-{rank}" for rank in range(world)]
    processes = []
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, __file__, str(rank), str(world), str(folder)]
            with log.open("wb") as output:
                processes.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        for process in processes:
            process.wait(timeout=LIMIT_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    files = [folder / f"found{world}-{rank}.json" for rank in range(world)]
    for file, log in zip(files, logs, strict=True):
        assert file.exists(), log.read_text()
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return outcomes(folder, 2)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return outcomes(folder, 4)


def check(folder: Path, found: list[dict[str, Any]], case: str) -> None:
    from transformers import AutoModelForCausalLM

    for of_rank in found:
        assert case in of_rank, of_rank.get("traceback")
        assert of_rank[case]["wrong"] == []
        assert of_rank[case]["largest"] <= 1000
    out = folder / f"out{len(found)}" / case
    assert len(list(out.glob("*.safetensors"))) > 2
    again = AutoModelForCausalLM.from_pretrained(out, dtype="auto").state_dict()
    original = hugging_face_model(case.split("-")[0]).state_dict()
    assert again.keys() == original.keys()
    for name, tensor in original.items():
        assert again[name].dtype == tensor.dtype
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize(("family", "layout"), cases(2))
def test_two_ranks(family: str, layout: str, two: list[dict[str, Any]], folder: Path) -> None:
    check(folder, two, f"{family}-{layout}")


@pytest.mark.parametrize(("family", "layout"), cases(4))
def test_four_ranks(family: str, layout: str, four: list[dict[str, Any]], folder: Path) -> None:
    check(folder, four, f"{family}-{layout}")


@pytest.mark.parametrize("family", [family for family in CONFIGS if family != "qwen3_moe_fused"])
def test_ranks_read_nothing_but_their_shards(family: str, two: list[dict[str, Any]]) -> None:
    read = [of_rank[f"{family}-fsdp"]["bytes"] for of_rank in two]
    total = two[0][f"{family}-fsdp"]["total"]
    assert sum(read) == total
    assert max(read) < 0.53 * total
    for of_rank in two:
        assert of_rank[f"{family}-plain"]["bytes"] == total


def test_four_ranks_read_a_quarter_each(four: list[dict[str, Any]]) -> None:
    for case in ("qwen3-fsdp", "qwen3-fsdp_rows"):
        total = four[0][case]["total"]
        assert max(of_rank[case]["bytes"] for of_rank in four) < 0.29 * total


@pytest.mark.parametrize(
    ("failure", "kind", "words"),
    [
        ("parameter", ModelError, "odd"),
        ("space", CheckpointError, "File too large"),
        ("finish", CheckpointError, "absent"),
    ],
)
def test_a_failure_on_one_rank_is_raised_on_both(
    failure: str, kind: type[ForgeError], words: str, two: list[dict[str, Any]]
) -> None:
    for of_rank in two:
        name, text, left = of_rank["failures"][failure]
        assert name == kind.__name__
        assert words in text
        assert left == []


@pytest.mark.parametrize("family", list(CONFIGS))
def test_the_trained_model_has_these_parameters(family: str, folder: Path) -> None:
    from forge.models.language_model import titan_config

    config = CONFIGS[family]
    model = titan_config(config, max_seq_len=16).build()
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    expected = {slot.name: slot.shape for slot in weight_map(config)}
    assert shapes == expected
    model.to_empty(device="cpu")
    load_hf([model], folder / "models" / family, config)
    hugging_face = hugging_face_model(family).state_dict()
    assert torch.equal(model.norm.weight, hugging_face["model.norm.weight"].float())
    assert torch.equal(model.lm_head.weight, hugging_face["lm_head.weight"].float())


def test_a_kill_leaves_the_old_folder_whole(tmp_path: Path) -> None:
    config = CONFIGS["qwen3"]
    target = tmp_path / "out"
    export_hf([ones(config)], target, config)
    before = (target / "model.safetensors").read_bytes()
    (target / "old").touch()
    command = [sys.executable, __file__, "die", str(target)]
    killed = subprocess.run(command, timeout=LIMIT_S, env=environment_of_ranks())
    assert killed.returncode == -signal.SIGKILL
    assert sorted(path.name for path in target.iterdir()) == ["model.safetensors", "old"]
    assert (target / "model.safetensors").read_bytes() == before
    export_hf([ones(config)], target, config, overwrite=True)
    assert [path.name for path in target.iterdir()] == ["model.safetensors"]
    assert list(tmp_path.iterdir()) == [target]


if __name__ == "__main__" and sys.argv[1] == "die":
    die_while_writing(Path(sys.argv[2]))
elif __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
