"""An environment of verifiers: count to three, one number in each answer. Some words make it fail."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import httpx
import verifiers.v1 as vf

__all__ = ["CountingHarness", "CountingTaskset"]
NUMBERS = ("one", "two", "three")


class CountingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """A task."""

    @vf.reward
    async def counted(self, trace: vf.Trace) -> float:
        said = [message.content.strip() for message in trace.branches[-1].messages if message.role == "assistant"]
        if said[-1] == "violation":
            return float("nan")
        if said[-1] == "raise":
            raise RuntimeError("the reward function is broken")
        return float(sum(a == b for a, b in zip(said, NUMBERS, strict=False)))

    @vf.reward(weight=0.5)
    async def brief(self, trace: vf.Trace) -> float:
        return 0.0


class CountingTaskset(vf.Taskset[CountingTask, vf.TasksetConfig]):
    """Two tasks."""

    def load(self) -> Iterable[CountingTask]:
        for who in ("Ada", "Grace"):
            yield CountingTask(vf.TaskData(prompt=f"Count to three, {who}."), self.config.task)


class CountingHarness(vf.Harness[vf.HarnessConfig]):
    """Talks to the model until it has counted or failed."""

    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any
    ) -> vf.ProgramResult:
        messages: list[dict[str, Any]] = [{"role": "user", "content": data.prompt}]
        async with httpx.AsyncClient(timeout=None, verify=False) as client:
            for expected in NUMBERS:
                response = await client.post(
                    f"{endpoint.rstrip('/')}/chat/completions",
                    json={"model": ctx.model, "messages": messages},
                    headers={"Authorization": f"Bearer {secret}"},
                )
                if response.status_code != 200:
                    return vf.ProgramResult(1, "", response.text[:500])
                answer = response.json()["choices"][0]["message"]
                said = (answer.get("content") or "").strip()
                if said == "crash":
                    subprocess.Popen(["sleep", "1000"], start_new_session=True)
                    os._exit(3)
                while said == "hang":
                    time.sleep(60)
                if said == "flood":
                    sys.stdout.write("na " * 2_000_000)
                    raise RuntimeError("na " * 2_000_000)
                if said != expected:
                    break
                messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "Next."}]
        return vf.ProgramResult(0, "", "")
