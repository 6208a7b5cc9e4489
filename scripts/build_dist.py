"""Build the source distribution and the wheel, from a copy of the tracked files: python scripts/build_dist.py FOLDER.

The build backend of the running interpreter is used, so nothing is downloaded; it must have setuptools 77 or newer. The
wheel is built from the unpacked source distribution, as pip builds it where there is no wheel.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NEEDED = ("apps", "src", "LICENSE", "MANIFEST.in", "README.md", "pyproject.toml", "setup.py")
IGNORED = shutil.ignore_patterns("__pycache__", "*.egg-info", "*.pyc", "runs")
OPTIONAL = ("CHANGELOG.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "SECURITY.md", "constraints.txt")


def copy_sources(target: Path) -> Path:
    """Copy what a distribution is built from, without caches, and return the copy."""
    target.mkdir(parents=True)
    for name in (*NEEDED, *OPTIONAL):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=IGNORED)
        else:
            shutil.copy(source, target / name)
    return target


def build(sources: Path, kind: str, output: Path) -> Path:
    """Build an `sdist` or a `wheel` of a source tree, and return the file."""
    output.mkdir(parents=True, exist_ok=True)
    code = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    ran = subprocess.run(
        [sys.executable, "-c", code, str(output)],
        cwd=sources,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    if ran.returncode != 0:
        raise SystemExit(f"the {kind} could not be built:\n{ran.stdout}{ran.stderr}")
    return output / ran.stdout.splitlines()[-1]


def unpack(sdist: Path, target: Path) -> Path:
    """Unpack a source distribution, and return its one folder."""
    with tarfile.open(sdist) as archive:
        archive.extractall(target, filter="data")
    (folder,) = target.iterdir()
    return folder


def main(output: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="forge-dist-") as place:
        sdist = build(copy_sources(Path(place) / "sources"), "sdist", output)
        wheel = build(unpack(sdist, Path(place) / "unpacked"), "wheel", output)
    print(f"{sdist}\n{wheel}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python scripts/build_dist.py FOLDER")
    main(Path(sys.argv[1]).resolve())
