"""Runs functions on the ranks of a gloo group, each rank in a process of its own, without importing torch every time.

One process imports torch and the test's module, and forks the ranks of every case from there. A rank that takes longer
than LIMIT_S is ended by its own alarm, and all of them die with the process that forked them.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rank_server import LIMIT_S, RankServer, until_closed

_PR_SET_PDEATHSIG = 1


class Ranks(RankServer):
    """Forks ranks on request. `run` returns the ranks' exit codes; a negative one is the signal that ended it."""

    def __init__(self, module: str) -> None:
        super().__init__(module, program=__file__)

    def run(
        self, function: Callable[..., None], world_size: int, *, scratch: Path, has_group: bool = True, **arguments: Any
    ) -> list[int]:
        """Call `function(rank=…, **arguments)` on every rank. Arguments go through JSON; world size 0: no group."""
        meeting = scratch / f"meeting-{os.urandom(4).hex()}"
        case = {
            "function": function.__name__,
            "world_size": world_size,
            "has_group": has_group,
            "meeting": str(meeting),
        }
        self.requests.write(json.dumps({**case, "arguments": arguments}, default=str).encode() + b"\n")
        self.requests.flush()
        codes: list[int] = json.loads(self.answers.readline())
        return codes


def ranks_of(module: str) -> Iterator[Ranks]:
    """The body of a module's fixture."""
    yield from until_closed(Ranks(module))


def _serve(module_name: str) -> None:
    import torch
    import torch._dynamo  # the first optimizer step would import it, on every rank
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.set_num_threads(1)
    module = importlib.import_module(module_name)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what ranks print must not be taken for an answer
    for line in sys.stdin:
        case = json.loads(line)
        processes = [_fork(module, case, rank=rank) for rank in range(max(1, case["world_size"]))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes]
        answers.write(json.dumps(codes) + "\n")
        answers.flush()


def _fork(module: Any, case: dict[str, Any], *, rank: int) -> int:
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.alarm(LIMIT_S)
        _run_rank(module, case, rank=rank)
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it is, it is the exit code
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _run_rank(module: Any, case: dict[str, Any], *, rank: int) -> None:
    import torch.distributed as dist

    if case["world_size"] and case["has_group"]:
        dist.init_process_group(
            "gloo", init_method=f"file://{case['meeting']}", rank=rank, world_size=case["world_size"]
        )
        dist.barrier()  # a rank that leaves before another has connected would make that one fail
    getattr(module, case["function"])(rank=rank, **case["arguments"])
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    _serve(sys.argv[1])
    os._exit(0)  # nothing is left to finish, and the interpreter would take a second to unload torch
