"""One side of `sync_gpu.py`: the weights' whole way, from a trainer that has stepped to a generator that serves them.

    python gpu_sync.py SIDE PLAN.json FOLDER ROUNDS

The workers are those of a run (`forge.loops.workers.start_workers`). Each round publishes a version, lets the generator
load it, and asks for one token, whose version must be the new one. Rounds with and without the proof that generator and
trainer compute the same (the canary) take turns.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from pathlib import Path
from typing import Any

from harness.gpu_ours import settings_of
from harness.gpu_plan import Plan, do_and_end, say

NUM_WARM = 2


async def one_round(workers: Any, prompt: Any, *, version: int, sampling: Any, with_proof: bool) -> dict[str, Any]:
    """Seconds of each part of the way."""
    began = time.perf_counter()
    if with_proof:
        await workers.trainer.publish_weights(version, name="policy")
    else:  # as it does, but for the proof
        trainer = workers.trainer
        await trainer.service.publish_weights.route(
            version, name="policy", canary=False, dtype=trainer._dtype, keep=trainer._keep
        )
    published = time.perf_counter()
    reports = await workers.policy.update_weights(version)
    taken = time.perf_counter()
    (completion,) = await workers.policy.generate(prompt, sampling=sampling)
    served = time.perf_counter()
    if completion.version != version:
        raise AssertionError(f"version {version} was published, and version {completion.version} answered")
    return {
        "with_proof": with_proof,
        "publish_s": published - began,
        "take_s": taken - published,
        "way_s": taken - began,
        "token_s": served - taken,
        "stall_s": max((report.stall_s for report in reports), default=0.0),
        "update_s": max((report.seconds for report in reports), default=0.0),
    }


async def measure(plan: Plan, folder: Path, side: str, num_rounds: int) -> None:
    import forge
    from forge.config import GRPOConfig, load
    from forge.loops.planning import plan_run
    from forge.loops.workers import start_workers
    from forge.store import Weights

    config = load(GRPOConfig, overrides=settings_of(plan, folder, side))
    run = plan_run(config)
    _, prompt = run.prompts.at(0)
    sampling = run.sampling.model_copy(update={"n": 1, "max_tokens": 1})
    async with forge.run():
        workers = await start_workers(run.config, run.trainer, loss=run.loss, run=run.run)
        state = await workers.trainer.state()
        say("started", num_parameters=state["num_parameters"], device_name=state["device_name"])
        for version in range(2 * (num_rounds + NUM_WARM)):
            found = await one_round(workers, prompt, version=version, sampling=sampling, with_proof=version % 2 == 0)
            if version >= 2 * NUM_WARM:
                say("round", **found)
        for known in await Weights("policy").versions():
            say("published", version=known.number, num_bytes=known.num_bytes)
        await workers.close()


def main() -> None:
    side, plan_file, folder, num_rounds = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    do_and_end(lambda: asyncio.run(measure(Plan.read(plan_file), folder, side, num_rounds)))


if __name__ == "__main__":
    main()
