"""Virtual environments for foreign packages: made once, whole or not at all; errors have pip's own words."""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from forge.envs.external import venvs
from forge.envs.external.venvs import VenvError, cache_folder, python_of


def make_wheel(folder: Path, name: str = "foreign_game") -> Path:
    """Write a wheel with one module, which pip installs without an index."""
    files = {
        f"{name}.py": "ANSWER = 42\n",
        f"{name}-1.0.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        f"{name}-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nGenerator: me\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text)}")
    files[f"{name}-1.0.dist-info/RECORD"] = "\n".join([*lines, f"{name}-1.0.dist-info/RECORD,,"]) + "\n"
    wheel = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


def test_a_venv_is_made_once_for_all_who_ask_and_again_where_it_was_not_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []
    make = venvs._make
    monkeypatch.setattr(venvs, "_make", lambda *args, **options: (made.append(args), make(*args, **options)))
    wheel, cache = str(make_wheel(tmp_path)), tmp_path / "cache"
    unfinished = cache / venvs._name_of([wheel])
    (unfinished / "bin").mkdir(parents=True)
    (unfinished / "bin" / "python").write_text("half")  # its maker was killed
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: python_of([wheel], cache=cache), range(4)))
    assert found == {unfinished / "bin" / "python"}
    assert len(made) == 1
    code = "import foreign_game, sys; print(foreign_game.ANSWER, 'torch' in sys.modules)"
    assert subprocess.check_output([*found, "-c", code], text=True) == "42 False\n"
    assert json.loads((unfinished / "forge-finished.json").read_text())["requirements"] == [wheel]
    assert python_of([f" {wheel}", wheel], cache=cache) in found
    assert len(made) == 1


def test_what_pip_says_is_in_the_error_and_nothing_is_left(tmp_path: Path) -> None:
    missing = str(tmp_path / "missing-1.0-py3-none-any.whl")
    with pytest.raises(VenvError, match=r"missing-1\.0") as error:
        python_of([missing], cache=tmp_path / "cache")
    assert (error.value.path, error.value.value) == ("requirements", [missing])
    assert "pip" in error.value.message
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_pip_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    with pytest.raises(VenvError, match=r"took longer than 0\.01 s"):
        python_of([str(make_wheel(tmp_path))], cache=tmp_path / "cache", limit_s=0.01)


def test_the_name_depends_on_all_requirements_and_the_cache_can_be_moved(tmp_path: Path) -> None:
    assert venvs._name_of(["a==1", "b"]) != venvs._name_of(["a==2", "b"])
    assert venvs._name_of(["open-env[all]>=1"]).startswith("open-env-")
    assert cache_folder({"FORGE_CACHE": "/big"}) == Path("/big/venvs")
    assert cache_folder({"XDG_CACHE_HOME": "/c"}) == Path("/c/torchforge/venvs")
    for empty in ([], [" "]):
        with pytest.raises(VenvError, match="needs requirements"):
            python_of(empty, cache=tmp_path)


def test_looking_for_pip_leaves_setuptools_importable() -> None:
    """A search for the module `pip` would make a later import of setuptools, and so of vLLM, fail in this process."""
    program = (
        "from forge.envs.external import venvs; assert venvs._has_pip(); import setuptools, distutils.core as core; "
    )
    program += "assert '_distutils' in core.__file__"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
