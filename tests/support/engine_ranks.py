"""Runs functions on the ranks of an engine, each rank in a process of its own, without importing torch every time.

One process imports torch, TorchTitan and the test's module, and forks the ranks of every case from there. The ranks of
a case may make one engine after the other with `opened`. When one of them fails the others are ended, since they would
wait for it; a rank that takes longer than LIMIT_S is ended by its own alarm, and all of them die with the process that
forked them. Run as a program this file is that process.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rank_server import LIMIT_S, RankServer, until_closed

if TYPE_CHECKING:
    from forge.config import TrainerConfig
    from forge.losses import AnyLoss
    from forge.trainer.engine import Engine
    from forge.types import Batch

_PR_SET_PDEATHSIG = 1


class Ranks(RankServer):
    """Forks ranks on request."""

    def __init__(self, module: str) -> None:
        super().__init__(module, program=__file__)

    def run(self, function: Callable[..., Any], num_ranks: int, *, scratch: Path, **arguments: Any) -> list[Any]:
        """Call `function(**arguments)` of the test's module on every rank; what each rank returned."""
        scratch.mkdir(parents=True, exist_ok=True)
        pickle.dump((function.__name__, num_ranks, str(scratch), arguments), self.requests)
        self.requests.flush()
        codes: list[int] = pickle.load(self.answers)
        wrong = {rank: scratch / f"error{rank}" for rank, code in enumerate(codes) if code}
        assert not wrong, "\n".join(
            f"rank {rank} ended with {codes[rank]}: {path.read_text() if path.exists() else ''}"
            for rank, path in wrong.items()
        )
        return [pickle.loads((scratch / f"answer{rank}").read_bytes()) for rank in range(num_ranks)]


def ranks_of(module: str) -> Iterator[Ranks]:
    """The body of a module's fixture."""
    yield from until_closed(Ranks(module))


class _Meeting:
    """How the ranks of a case find each other: rank 0 opens a store on a free port and tells the others which."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._pipes = [os.pipe() for _ in range(num_ranks)]
        self._stores: list[Any] = []

    def announce(self, rank: int) -> None:
        """Set the environment that the next engine of this rank reads."""
        from torch.distributed import TCPStore

        if rank == 0:
            self._stores.append(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
            port = str(self._stores[-1].port)
            for _, write in self._pipes[1:]:
                os.write(write, f"{port:>5}".encode())
        else:
            port = os.read(self._pipes[rank][0], 5).decode().strip()
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(self.num_ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=port,
            TORCHELASTIC_USE_AGENT_STORE="True",
        )

    def close(self) -> None:
        for pipe in self._pipes:
            for end in pipe:
                os.close(end)


_place: tuple[int, _Meeting] | None = None


@contextmanager
def opened(config: TrainerConfig, loss: AnyLoss | None = None) -> Iterator[Engine]:
    """An engine on the ranks of this case."""
    from forge.trainer.engine import Engine

    assert _place is not None
    _place[1].announce(_place[0])
    engine = Engine(config, loss=loss)
    yield engine
    engine.close()


@contextmanager
def gradients_of(engine: Engine) -> Iterator[dict[str, Any]]:
    """What the optimizer finds in its parameters during `train_step`: whole gradients by the parameters' names.

    A pipeline's rank has those of its own layers.
    """
    from torch.distributed.tensor import DTensor
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    from forge.models.weights import named_parameters

    found: dict[str, Any] = {}

    def look(*_: Any) -> None:
        for name, parameter in named_parameters(engine.parts):
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.full_tensor()
            found[name] = None if gradient is None else gradient.clone()

    hook = register_optimizer_step_pre_hook(look)
    try:
        yield found
    finally:
        hook.remove()


def whole_weights(engine: Engine) -> dict[str, Any]:
    """Copies of the parameters that this rank holds or has a part of."""
    from torch.distributed.tensor import DTensor

    own = engine.own_parameters()
    return {name: (p.full_tensor() if isinstance(p, DTensor) else p).clone() for name, p in own.items()}


def made_batch(
    lengths: Sequence[int], *, vocab: int, fields: Sequence[str] = (), seed: int = 0, weightless: Sequence[int] = ()
) -> Batch:
    """Random samples: about a third of the tokens do not count, nor any of the samples in `weightless`.

    Where a token does not count its fields are NaN, since nobody may look at them.
    """
    import torch

    from forge.types import Batch, Sample

    maker = torch.Generator().manual_seed(seed)
    samples = []
    for index, length in enumerate(lengths):
        tokens = torch.randint(vocab, (length,), generator=maker)
        weights = torch.rand(length, generator=maker) + 0.5
        weights[torch.rand(length, generator=maker) < 0.3] = 0.0
        if length > 1:
            weights[-1] = 0.75
        weights[0] = 0.0
        if index in weightless:
            weights.zero_()
        made = {name: torch.randn(length, generator=maker) for name in fields}
        for name, values in made.items():
            if name.endswith("logprobs"):
                values.mul_(0.3).sub_(4.0)
            values[weights == 0] = float("nan")
        samples.append(Sample(tokens, weights, made, identity=f"made:{index}"))
    return Batch.of(samples)


def _serve(module_name: str) -> None:
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # the first optimizer step would import it, on every rank

    for name in ("engine", "checkpointer"):  # before TorchTitan, which they prepare for a machine without a GPU
        importlib.import_module(f"forge.trainer.{name}")
    importlib.import_module("torchtitan.trainer")  # as the first model would, on every rank

    sys.modules["engine_ranks"] = sys.modules["__main__"]
    module = importlib.import_module(module_name)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what ranks print must not be taken for an answer
    while True:
        try:
            function, num_ranks, scratch, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        meeting = _Meeting(num_ranks)
        case = (getattr(module, function), Path(scratch), arguments)
        processes = [_fork(*case, rank=rank, meeting=meeting) for rank in range(num_ranks)]
        pickle.dump(_wait(processes), answers)
        answers.flush()
        meeting.close()


def _wait(processes: list[int]) -> list[int]:
    """The exit codes of all ranks. When one fails, the others are ended."""
    codes: dict[int, int] = {}
    while len(codes) < len(processes):
        process, status = os.wait()
        codes[process] = os.waitstatus_to_exitcode(status)
        if codes[process]:
            for other in processes:
                if other not in codes:
                    os.kill(other, signal.SIGKILL)
    return [codes[process] for process in processes]


def _fork(function: Callable[..., Any], scratch: Path, arguments: Any, *, rank: int, meeting: _Meeting) -> int:
    global _place
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.alarm(LIMIT_S)
        _place = (rank, meeting)
        (scratch / f"answer{rank}").write_bytes(pickle.dumps(function(**arguments)))
        code = 0
    except BaseException:  # noqa: BLE001  # whatever it is, it is the exit code
        (scratch / f"error{rank}").write_text(traceback.format_exc())
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(sys.argv[1])
    os._exit(0)  # nothing is left to finish, and the interpreter would take a second to unload torch
