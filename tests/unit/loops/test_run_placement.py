"""Runs on many GPUs: every process finds a place on the hosts that the file names, in the order in which a run starts
them. A trainer over several hosts needs whole ones, so it must not come after replicas that are spread over all."""

from __future__ import annotations

import asyncio
import types
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from forge.config import GRPOConfig, load
from forge.loops import workers
from forge.loops.planning import plan_run
from forge.runtime.group import GroupSpec
from forge.runtime.hosts import Host, HostFacts
from forge.runtime.membership import Membership
from forge.service import ForgeActor
from forge.service.options import ServiceOptions

APPS = Path(__file__).parents[3] / "apps" / "grpo"
GPUS = tuple("01234567")
SMALL = (
    *("model.preset=tiny", "model.path=null", "model.max_seq_len=8192"),
    *("prompts.sources=[{task: arithmetic}]", "evaluation.sources=[]"),
)
ELSEWHERE = ("launcher.kind=hosts", "launcher.hosts=[tcp://host0:22222]")
"""The GPUs of this machine do not matter."""


class Placed:
    """Stands for services: places their processes as the library does, and starts none."""

    def __init__(self, num_hosts: int) -> None:
        names = [f"host{number}" for number in range(num_hosts)]
        hosts = [Host(name, None, address=name, facts=HostFacts(name, 64, GPUS, 0)) for name in names]
        self.membership = Membership(hosts)
        self.where: dict[str, list[Host]] = {}

    def options(self, cls: type, **keywords: Any) -> Any:
        async def as_service(*args: Any) -> Any:
            options = ServiceOptions.from_keywords(**keywords)
            for index in range(options.num_replicas):
                self._place(options, f"{options.mesh_name}[{index}]")

            async def route(*args: Any) -> dict[str, Any]:
                await asyncio.sleep(0)
                return {"visible_gpus": None}

            return types.SimpleNamespace(state=types.SimpleNamespace(route=route))

        return types.SimpleNamespace(as_service=as_service)

    def _place(self, options: ServiceOptions, label: str) -> None:
        spec = GroupSpec(object, (), {}, label=label, num_procs=options.procs, with_gpus=options.with_gpus)
        hosts = self.membership.pick(options.hosts or 1, spec=spec)
        for host in hosts:
            host.num_groups += 1
            if options.with_gpus:
                host.gpus.take(options.procs, holder=label)
        self.where.setdefault(str(options.mesh_name), []).extend(hosts)

    @property
    def num_free(self) -> int:
        return sum(len(host.gpus.free) for host in self.membership.hosts)


def placed(name: str, num_hosts: int, *overrides: str) -> Placed:
    """Start the workers of a configuration on so many hosts of eight GPUs."""
    found = Placed(num_hosts)
    config = load(GRPOConfig, files=[APPS / f"{name}.yaml"], overrides=[*SMALL, *overrides])
    plan = plan_run(config)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ForgeActor, "options", classmethod(lambda cls, **keywords: found.options(cls, **keywords)))
        asyncio.run(workers.start_workers(plan.config, plan.trainer, loss=plan.loss, run=plan.run))
    return found


@pytest.mark.parametrize(
    ("name", "num_hosts", "for_trainer", "of_generators"),
    [
        ("qwen3_8b", 1, 1, [4]),
        ("qwen3_32b", 3, 2, [4]),
        ("qwen3_32b_64gpu_slurm", 8, 4, [4, 4, 4, 4]),
        ("qwen3_32b_64gpu_kubernetes", 8, 4, [4, 4, 4, 4]),
    ],
)
def test_all_gpus_are_used(name: str, num_hosts: int, for_trainer: int, of_generators: list[int]) -> None:
    found = placed(name, num_hosts, *(ELSEWHERE if num_hosts == 1 else ()))
    assert len(found.where["trainer"]) == for_trainer
    assert sorted(Counter(host.name for host in found.where["generator"]).values()) == of_generators
    assert found.num_free == 0
    if num_hosts > 1:
        assert not set(found.where["generator"]) & set(found.where["trainer"])


def test_replicas_on_gpus_leave_the_trainer_its_hosts() -> None:
    references = ("algorithm.kl.coefficient=0.01", "reference.num_replicas=2", "reference.with_gpus=true")
    found = placed("qwen3_32b", 3, "generator.num_replicas=3", *references)
    assert found.num_free == 0
    assert not set(found.where["reference"]) & set(found.where["trainer"])
