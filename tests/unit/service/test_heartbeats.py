"""How often replicas are asked for a heartbeat."""

from __future__ import annotations

import pytest

from forge.service.supervisor import MAX_HEARTBEATS_PER_S, heartbeat_pause_s


@pytest.mark.parametrize("num_replicas", [1, 16, MAX_HEARTBEATS_PER_S])
def test_a_service_asks_as_often_as_its_options_say(num_replicas: int) -> None:
    assert heartbeat_pause_s(1.0, num_replicas) == 1.0


@pytest.mark.parametrize(("heartbeat_s", "num_replicas"), [(1.0, 10_000), (0.05, 200), (0.001, 7)])
def test_the_rate_of_all_replicas_together_is_bounded(heartbeat_s: float, num_replicas: int) -> None:
    pause_s = heartbeat_pause_s(heartbeat_s, num_replicas)
    assert pause_s >= heartbeat_s
    assert num_replicas / pause_s == pytest.approx(MAX_HEARTBEATS_PER_S)
