"""Storage volumes: processes that hold published data for others, so that it outlives its publisher."""

from __future__ import annotations

from typing import get_args

from forge.errors import StoreError
from forge.runtime.actor import MeshActor
from forge.runtime.endpoints import endpoint
from forge.store.client import client
from forge.store.registry_relays import Distribution
from forge.store.weights import check_whole_number


def register_volume(label: str) -> None:
    """Let this process hold what others publish from now on."""
    here = client()
    address = here.data_plane.serve().address
    here.line.call("volume", here.holder("tcp", "", address=address, volume=label))


class Volume(MeshActor):
    """Holds segments. A publisher on its host shares its memory with it; others send theirs."""

    def __init__(self, label: str) -> None:
        self.label = label

    @endpoint
    def setup(self) -> None:
        register_volume(self.label)

    @endpoint
    def num_segments(self) -> int:
        """Return how many segments it holds now."""
        return client().data_plane.segments.num_held


async def setup(*, volumes: int = 0, copies: int = 1, distribution: Distribution = "auto") -> list[object]:
    """Choose where published data is kept and how it gets to other hosts, before the first publication.

    With no volumes, the default, the data stays with its publishers. With volumes, every part of a version goes to one
    of them, or with `copies` to so many: it then outlives its publisher, and with two copies the loss of a volume too.

    Args:
        volumes: how many storage volumes to start, spread over the hosts of the run.
        copies: on how many volumes each part is kept.
        distribution: how versions of weights get to readers on other hosts. `auto`: once to each host, from one host to
            the next. `direct`: each reader gets them from those who hold them.
    """
    check_whole_number("ts.setup(volumes=)", volumes, least=0)
    check_whole_number("ts.setup(copies=)", copies, least=1)
    if volumes and copies > volumes:
        raise StoreError(
            "there are fewer volumes than copies",
            path="ts.setup(copies=)",
            value=copies,
            rule=f"at most as many as volumes: {volumes}",
            repair=f"ts.setup(volumes={copies}, copies={copies})",
        )
    if distribution not in get_args(Distribution):
        raise StoreError(
            "there is no such distribution",
            path="ts.setup(distribution=)",
            value=distribution,
            rule=f"one of {', '.join(get_args(Distribution))}",
            repair='distribution="auto"',
        )
    await client().line.call_async("copies", copies)
    await client().line.call_async("distribution", distribution)
    started: list[object] = []
    for number in range(volumes):
        label = f"store-volume-{number}"
        started.append(await Volume.options(mesh_name=label).as_actor(label))
    return started
