"""Ranks that are forks of a fork server use the GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from forge import Generator, GeneratorConfig
from forge.config import ModelConfig
from forge.generator.actor import _PRELOAD
from forge.runtime.forking import SCOPE

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.alone, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

IMPORTS = """
import importlib, os, sys
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
for name in sys.argv[1:]:
    importlib.import_module(name)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"{name} starts {threads - 1} threads"
"""


def test_nothing_that_is_preloaded_starts_cuda():
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", IMPORTS, *_PRELOAD]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr


def test_a_fork_generates_on_the_gpu_also_after_a_kill(drive, monkeypatch):
    monkeypatch.delenv(SCOPE, raising=False)

    async def body():
        options = Generator.options(num_replicas=1, with_gpus=True)
        policy = await options.as_service(GeneratorConfig(model=ModelConfig(preset="tiny")))
        for number in range(2):
            completions = await policy.generate.route("The sea was", n=2, sampling={"max_tokens": 8})
            assert all(len(each.token_ids) == 8 for each in completions)
            pid = (await policy.get_metrics()).replicas[0].pids[0]
            parents = [" ".join(parent.cmdline()) for parent in psutil.Process(pid).parents()]
            assert any("forge.runtime.fork_server" in line for line in parents)
            os.kill(pid, signal.SIGKILL)
            await policy.wait_until(
                lambda now, number=number: now.replicas[0].restarts > number and now.replicas[0].health == "healthy"
            )

    drive(body())
