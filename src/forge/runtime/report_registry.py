"""The root's end of the reports of all processes of a run; see `forge.runtime.reports`."""

from __future__ import annotations

from typing import Any

from forge.observe.phases import PhaseEvent, take_phase
from forge.runtime.relay import relay
from forge.runtime.rendezvous_server import Session


def open_registry() -> ReportRegistry:
    return ReportRegistry()


class ReportRegistry:
    """Passes reports on. Nothing here blocks: it runs on the control loop."""

    def joined(self, session: Session) -> None:
        """Admit every process of the run."""

    async def handle(self, session: Session, name: str, body: Any) -> None:
        """Take one report."""
        process, value = body
        if name == "record":
            relay().put(process, value)
        elif name == "phase":
            take_phase(PhaseEvent(process, *value))

    def left(self, session: Session) -> None:
        """Nothing belongs to a session."""

    async def close(self) -> None:
        """Nothing is kept."""
