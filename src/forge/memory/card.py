"""The GPUs that a plan is made for: those of this machine, or any that you name."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

from forge.errors import ConfigError
from forge.memory.constants import CARD_RESERVE, GIB, MIB
from forge.runtime.placement import visible_gpus

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:g|gb|gib)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Card:
    """GPUs of one kind.

    Attributes:
        num_bytes: the memory of one, as it is sold.
        num_gpus: how many there are; None for as many as a run needs.
        name: what it is called.
    """

    num_bytes: int
    num_gpus: int | None = None
    name: str = "GPU"

    @property
    def usable(self) -> int:
        """What processes can have of one."""
        return int(self.num_bytes * (1 - CARD_RESERVE))


def parse_size(text: str, *, path: str = "--gpu-memory") -> int:
    """Bytes of a size such as `80GB`, `80GiB` or `80`.

    GB and GiB both mean 2**30 bytes here, because a card that is sold with 80 GB has 80 GiB, less what `Card.usable`
    leaves out.
    """
    found = _SIZE.fullmatch(text.strip())
    if found is None or float(found[1]) <= 0:
        raise ConfigError(
            "the size of a GPU's memory cannot be read",
            path=path,
            value=text,
            rule="a positive number of GB, such as 80GB",
            repair=f"write {path} 80GB",
        )
    return int(float(found[1]) * GIB)


def find_card(environ: Mapping[str, str] | None = None) -> Card | None:
    """The GPUs that this process may use, asked of the driver without loading CUDA; None where there are none.

    Of GPUs of several sizes the smallest counts: a run must fit everywhere.
    """
    query = shutil.which("nvidia-smi")
    if query is None:
        return None
    command = [query, "--query-gpu=memory.total,name", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return read_card(answer.stdout, os.environ if environ is None else environ) if answer.returncode == 0 else None


def read_card(answer: str, environ: Mapping[str, str]) -> Card | None:
    """What the driver's answer says: a line for each GPU, its memory in MiB and its name."""
    found: list[tuple[int, str]] = []
    for line in answer.splitlines():
        size, _, name = line.partition(",")
        if size.strip().isdecimal():
            found.append((int(size), name.strip()))
    visible = visible_gpus(environ, len(found))
    chosen = [found[int(word)] for word in visible if word.isdecimal()] or (found if visible else [])
    if not chosen:
        return None
    smallest = min(chosen)
    return Card(smallest[0] * MIB, len(visible), smallest[1])


def host_memory() -> int | None:
    """The memory of this host, in bytes; None where the system does not say."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
