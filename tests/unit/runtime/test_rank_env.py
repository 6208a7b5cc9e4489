"""What a rank's environment says about where modules are."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from forge.runtime.import_environment import module_path


def test_only_the_users_own_places_are_passed_on(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    mine, other = tmp_path / "mine", tmp_path / "with space"
    own = [sysconfig.get_path("stdlib"), sysconfig.get_path("purelib"), f"{sysconfig.get_path('stdlib')}/lib-dynload"]
    paths = ["", "mine", str(other), *own, "/usr/lib/python3.zip", str(mine), "/odd:path"]
    assert module_path(paths) == f"{mine.resolve()}:{other.resolve()}"
    assert module_path([str(Path("."))]) == str(tmp_path.resolve())
