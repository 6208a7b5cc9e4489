"""What a trainer died of, where a call only says that its service has no replica left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from forge.errors import ActorFailure, ServiceStopped
from forge.trainer.handles import ServiceTrainer, death_of


def trainer(last_failure: str | None) -> ServiceTrainer:
    async def get_metrics() -> Any:
        return SimpleNamespace(replicas=(SimpleNamespace(last_failure=last_failure),))

    service: Any = SimpleNamespace(name="trainer", get_metrics=get_metrics)
    return ServiceTrainer(service)


def test_it_is_named_where_it_is_known_and_the_trainer_is_what_failed() -> None:
    stopped, other = ServiceStopped("no replica", path="trainer"), ServiceStopped("no replica", path="rewards")
    found = asyncio.run(death_of(trainer("rank 0 (process 7) ended"), stopped))
    assert isinstance(found, ActorFailure)
    assert found.message == "trainer was lost before this call: rank 0 (process 7) ended"
    assert asyncio.run(death_of(trainer(None), stopped)) is stopped
    assert asyncio.run(death_of(trainer("rank 0 (process 7) ended"), other)) is other
    elsewhere: Any = SimpleNamespace()
    assert asyncio.run(death_of(elsewhere, stopped)) is stopped
