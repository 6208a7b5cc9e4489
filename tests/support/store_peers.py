"""Plain processes of a run, without actors, that publish and fetch: as the workers of an inference engine do."""

from __future__ import annotations

import multiprocessing as mp
import os
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from forge.runtime.rendezvous import environment, secret_environment


@contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Peer:
    """A process that runs functions that it is given, one after the other, with a dict that lasts between them."""

    def __init__(self, **variables: str) -> None:
        context = mp.get_context("spawn")
        self._line, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        with _variables({**environment(), **secret_environment(), **variables}):
            self.process.start()
        theirs.close()

    def start(self, call: Callable[..., Any], *args: Any) -> None:
        self._line.send((call, args))

    def finish(self) -> Any:
        is_ok, value = self._line.recv()
        if not is_ok:
            raise RuntimeError(value)
        return value

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        """Call `call(state, *args)` there."""
        self.start(call, *args)
        return self.finish()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def stop(self) -> None:
        if self.process.is_alive():
            self._line.send(None)
        self.process.join(600)
        if self.process.is_alive():
            self.kill()
        self._line.close()


def _serve(line: Any) -> None:
    state: dict[str, Any] = {}
    while (wish := line.recv()) is not None:
        call, args = wish
        try:
            line.send((True, call(state, *args)))
        except Exception:  # noqa: BLE001 - told to whoever asked
            line.send((False, traceback.format_exc()))
