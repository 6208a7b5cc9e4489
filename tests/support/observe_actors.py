"""Actors that record figures and spans. Kept apart and light: every rank process imports this module."""

from __future__ import annotations

import os
from collections.abc import Sequence

from forge import ForgeActor, endpoint
from forge.observe import Reduce, is_tracing, record_metric, span
from forge.observe.fault_records import record_fault
from forge.observe.gauges import add_gauges, of_process
from forge.runtime.collect import collect

REDUCES = {"mean": Reduce.MEAN, "std": Reduce.STD, "max": Reduce.MAX, "min": Reduce.MIN, "sum": Reduce.SUM}


class Observed(ForgeActor):
    """Records what it is told to, on every rank."""

    @endpoint
    async def setup(self) -> None:
        with span("setup"):
            record_metric("observed/num_setups", 1, Reduce.COUNT)

    @endpoint(concurrent=True)
    async def record(self, values: Sequence[Sequence[float]]) -> int:
        """Record the values of this rank under every reduction; returns the process."""
        with span("record", num_values=len(values)):
            for value in values[int(os.environ["RANK"])]:
                for name, reduce in REDUCES.items():
                    record_metric(f"observed/{name}", value, reduce)
                record_metric("observed/count", value, Reduce.COUNT)
        return os.getpid()

    @endpoint(concurrent=True)
    async def record_sum(self, key: str, value: float) -> None:
        record_metric(key, value, Reduce.SUM)

    @endpoint
    def work(self, name: str) -> None:
        """On a thread."""
        with span(name, kind="thread"):
            pass

    @endpoint(concurrent=True)
    async def is_traced(self) -> bool:
        return is_tracing()


class Family(ForgeActor):
    """Has an actor of its own."""

    @endpoint
    async def setup(self) -> None:
        self.child = await Observed.options(mesh_name="child").as_actor()

    @endpoint
    async def record(self, value: float) -> None:
        record_metric("family/sum", value, Reduce.SUM)
        await self.child.record_sum.call_one("family/sum", 10 * value)

    @endpoint
    async def take(self) -> dict[str, float]:
        return (await collect(timeout_s=300.0)).metrics


class Ailing(ForgeActor):
    """Has a gauge, notices faults, and multiplies matrices."""

    @endpoint
    async def setup(self) -> None:
        self.level = 7.0
        add_gauges(self, lambda own: of_process({"level": own.level}))

    @endpoint(concurrent=True)
    async def fail(self) -> None:
        try:
            int("seven")
        except ValueError as error:
            record_fault("test", error, where="a number")

    @endpoint
    def multiply(self) -> float:
        import torch

        return float(torch.mm(torch.ones(8, 8), torch.ones(8, 8)).sum())
