"""Which faults that Monarch reports are dealt with, and which interrupt the controller."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest

from forge.runtime.backend import forget_faults, note_fault, watch_faults


@dataclass(frozen=True)
class Fault:
    mesh_name: str
    text: str = "The actor and all its descendants have failed"

    def report(self) -> str:
        return self.text


@pytest.mark.parametrize("mesh", ["logger-iFhs1sVtW7U", "log_forwarder-uzwovzpdrXp", "forge-calculator0-1-3ae6-jpn8"])
def test_what_faults_along_with_one_of_our_ranks_is_dealt_with(mesh: str) -> None:
    """`log_forwarder` is there only under IPython: without this the kernel's cell would be interrupted."""
    assert note_fault(Fault(mesh))


def test_a_mesh_of_somebody_else_keeps_its_hook() -> None:
    assert not note_fault(Fault("theirs-jpn8bregAeb"))


def test_who_watches_a_mesh_hears_of_its_fault() -> None:
    heard: list[str] = []
    watch_faults("forge-mine", heard.append)
    try:
        assert note_fault(Fault("forge-mine-jpn8bregAeb", "it died"))
    finally:
        forget_faults("forge-mine")
    assert heard == ["it died"]


@pytest.mark.parametrize("first", ["forge:ForgeActor", "forge.service:Service", "forge.generator.actor:Generator"])
def test_monarch_reads_our_settings_whatever_is_imported_first(first: str) -> None:
    module, _, name = first.partition(":")
    program = f"""
import json
from {module} import {name}
from monarch.config import get_global_config
print(json.dumps([get_global_config()[key] for key in ("mesh_proc_spawn_max_idle", "actor_spawn_max_idle")]))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HYPERACTOR_")}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True, text=True)
    assert json.loads(done.stdout.splitlines()[-1]) == ["2m", "2m"]
