"""Source distribution and wheel: what is in them, and that a user who has installed the wheel has everything to run.

The wheel is installed into a fresh environment, beside the packages of the running one, and used in an empty folder
outside of the repository, without PYTHONPATH. Nothing is downloaded.
"""

from __future__ import annotations

import email
import json
import os
import re
import runpy
import subprocess
import sys
import tarfile
import venv
import zipfile
from dataclasses import dataclass
from email.message import Message
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 900
CACHES = {"__pycache__", "runs"}
MOST_BYTES = 3_000_000
NOT_INSTALLED = {"forge/recipes/apps/diagnosis"}
"""Runs that fail on purpose, for a tutorial in the repository."""

pytestmark = pytest.mark.usefixtures("leaves_nothing")


def lacking() -> str | None:
    """Why a wheel cannot be built here; None if it can."""
    for name, least in (("setuptools", 77), ("pip", 23)):
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            return f"{name} is not installed"
        if int(version.partition(".")[0]) < least:
            return f"{name} is {version}, and {least} is needed"
    return None


@dataclass(frozen=True)
class Built:
    sdist: Path
    wheel: Path

    def names(self) -> list[str]:
        with zipfile.ZipFile(self.wheel) as archive:
            return archive.namelist()

    def metadata(self) -> Message:
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [each for each in archive.namelist() if each.endswith(".dist-info/METADATA")]
            return email.message_from_bytes(archive.read(name))


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel, and an empty folder to work in."""

    place: Path
    work: Path

    @property
    def packages(self) -> Path:
        (folder,) = (self.place / "lib").glob("python*/site-packages")
        return folder

    def run(self, *command: str, cwd: Path | None = None, **environ: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "FORGE_MODULE_FOLDERS")}
        program = str(self.place / "bin" / command[0])
        return subprocess.run(
            [program, *command[1:]],
            cwd=cwd or self.work,
            env={**kept, "OMP_NUM_THREADS": "1", **environ},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )

    def files(self) -> set[str]:
        """What is installed of the library, without what Python itself writes beside a module."""
        found = (path for path in (self.packages / "forge").rglob("*") if path.suffix != ".pyc")
        return {path.relative_to(self.packages).as_posix() for path in found if path.is_file()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    output = tmp_path_factory.mktemp("dist")
    command = [sys.executable, str(ROOT / "scripts" / "build_dist.py"), str(output)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    sdist, wheel = ran.stdout.splitlines()
    return Built(Path(sdist), Path(wheel))


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place, work = tmp_path_factory.mktemp("fresh") / "venv", tmp_path_factory.mktemp("empty")
    venv.create(place, with_pip=False, symlinks=True)
    made = Installed(place, work)
    shared = [path for path in sys.path if Path(path).name == "site-packages"]
    (made.packages / "shared.pth").write_text("".join(f"{path}\n" for path in shared))
    options = ["--no-deps", "--no-index", "--no-compile", "--ignore-installed", "--disable-pip-version-check"]
    pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python"), "install", *options]
    ran = subprocess.run([*pip, str(built.wheel)], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stderr
    return made


# ---- What is in them


def sources() -> set[str]:
    """The files of a wheel, from the repository: the package, and the recipes in it."""
    found = set()
    for root, inside in ((ROOT / "src", ""), (ROOT / "apps", "forge/recipes/apps/")):
        for path in root.rglob("*"):
            parts = set(path.relative_to(root).parts)
            is_other = parts & CACHES or any(part.endswith(".egg-info") for part in parts)
            name = f"{inside}{path.relative_to(root).as_posix()}"
            if path.is_file() and not is_other and not name.startswith(tuple(f"{each}/" for each in NOT_INSTALLED)):
                found.add(name)
    return found


def test_the_wheel_holds_the_package_and_the_recipes_and_nothing_else(built: Built) -> None:
    names = built.names()
    assert len(set(names)) == len(names)
    own = {name for name in names if ".dist-info/" not in name}
    assert own == sources()
    assert built.wheel.stat().st_size < MOST_BYTES
    assert {name.rpartition("/")[2] for name in names if ".dist-info/" in name} == {
        *("METADATA", "WHEEL", "RECORD", "LICENSE", "entry_points.txt", "top_level.txt")
    }


def test_the_source_distribution_holds_what_the_wheel_is_built_from(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {name.removeprefix("forge/recipes/") for name in sources() if name.startswith("forge/recipes/apps/")}
    wanted |= {f"src/{name}" for name in sources() if not name.startswith("forge/recipes/apps/")}
    wanted |= {"pyproject.toml", "setup.py", "README.md", "LICENSE", "CHANGELOG.md", "SECURITY.md"}
    assert wanted <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "runs/")) or "__pycache__" in name]


def test_the_metadata_leads_to_the_project(built: Built) -> None:
    found = built.metadata()
    urls = dict(text.split(", ", 1) for text in found.get_all("Project-URL") or [])
    assert set(urls) == {"Homepage", "Documentation", "Source", "Changelog", "Issues"}
    assert all(url.startswith("https://") for url in urls.values())
    assert (found["Name"], found["License-Expression"]) == ("torchforge", "BSD-3-Clause")
    assert found["Requires-Python"] == "<3.14,>=3.11"
    assert {"reinforcement learning", "llm"} <= set(found["Keywords"].split(","))
    pythons = {text for text in found.get_all("Classifier") or [] if re.search(r"Python :: 3\.\d+", text)}
    assert pythons == {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}


def test_the_description_has_no_link_that_works_in_the_repository_only(built: Built) -> None:
    found = built.metadata()
    text = str(found.get_payload())
    assert found["Description-Content-Type"] == "text/markdown"
    assert text.lstrip().startswith("# TorchForge")
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    own = [link for link in links if link.startswith("https://github.com/torchforge/torchforge/blob/main/")]
    places = [link.partition("/blob/main/")[2].partition("#")[0] for link in own]
    assert [place for place in places if not (ROOT / place).exists()] == []


def test_an_editable_install_reads_the_recipes_of_the_checkout(tmp_path: Path) -> None:
    if (reason := lacking()) is not None:
        pytest.skip(reason)
    scripts = runpy.run_path(str(ROOT / "scripts" / "build_dist.py"))
    sources_copy = scripts["copy_sources"](tmp_path / "checkout")
    wheel = scripts["build"](sources_copy, "editable", tmp_path / "dist")
    with zipfile.ZipFile(wheel) as archive:
        (pth,) = [name for name in archive.namelist() if ".dist-info/" not in name]
        assert archive.read(pth).decode().strip() == str(sources_copy / "src")
    code = "import forge.recipes as r; print(r.apps_folder())"
    environ = {**os.environ, "PYTHONPATH": str(sources_copy / "src")}
    ran = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(sources_copy / "apps")


# ---- What a user has


def test_every_command_comes_from_the_wheel(installed: Installed) -> None:
    code = "import forge, forge.recipes as r; print(forge.__file__); print(r.apps_folder())"
    ran = installed.run("python", "-c", code)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == [
        str(installed.packages / "forge" / "__init__.py"),
        str(installed.packages / "forge" / "recipes" / "apps"),
    ]


def test_recipes_are_listed_and_can_be_checked(installed: Installed) -> None:
    before = installed.files()
    listed = installed.run("forge", "recipes", "--all", "--json")
    assert listed.returncode == 0, listed.stderr
    found = {each["name"]: each for each in json.loads(listed.stdout)}
    assert all(Path(each["config"]).is_relative_to(installed.packages) for each in found.values())
    assert all(Path(each["program"]).is_file() for each in found.values())
    for words in (["run", "grpo/tiny", "--dry-run"], ["config", "check", "sft/tiny"]):
        checked = installed.run("forge", *words)
        assert checked.returncode == 0, checked.stderr
        assert checked.stdout.endswith("Nothing was started.\n")
    assert list(installed.work.iterdir()) == []
    assert installed.files() == before


def test_documented_commands_work_without_a_checkout(installed: Installed) -> None:
    command = ["run", "apps/sft/main.py", "--config", "apps/sft/tiny.yaml", "training.max_steps=2", "--dry-run"]
    ran = installed.run("forge", *command)
    assert ran.returncode == 0, ran.stderr
    assert "2, each of at most 8 rows" in ran.stdout


def test_a_recipe_makes_what_it_needs_and_is_resumed_under_a_supervisor(installed: Installed, tmp_path: Path) -> None:
    before = installed.files()
    run = tmp_path / "runs" / "sft-tiny-lora"
    first = installed.run("forge", "run", "sft/tiny_lora", "training.max_steps=1", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    assert "runs/sft-tiny is made first: forge run sft/tiny training.max_steps=20" in first.stderr
    assert (run / "checkpoints" / "adapter").is_dir()
    more = ["--supervise", "sft/tiny_lora", "training.max_steps=2", "--resume"]
    second = installed.run("forge", "run", *more, cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    assert "is made first" not in second.stderr
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(steps) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["runs"]
    assert installed.files() == before


def test_a_new_project_passes_its_test(installed: Installed, tmp_path: Path) -> None:
    made = installed.run("forge", "new", "my_project", "--task", "tools", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    ran = installed.run("python", "-m", "pytest", "-q", cwd=tmp_path / "my_project")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "3 passed" in ran.stdout


def test_the_quick_start_runs_in_an_empty_folder_without_a_compiler(installed: Installed, tmp_path: Path) -> None:
    """With few steps: `make quickstart` and the tests of its program say that it learns."""
    (tmp_path / "bin").mkdir()
    environ = {"PATH": str(tmp_path / "bin"), "XDG_CACHE_HOME": str(tmp_path / "cache"), "CC": ""}
    before = installed.files()
    work = tmp_path / "work"
    work.mkdir()
    few = ["training.max_steps=2", "training.warmup_steps=0", "rollout.batch_groups=4", "evaluation.max_prompts=8"]
    ran = installed.run("forge", "quickstart", *few, cwd=work, **environ)
    assert ran.returncode == 0, ran.stderr
    assert "Held-out accuracy: " in ran.stdout
    assert "there is no C compiler" in ran.stderr
    assert (work / "runs" / "quickstart" / "grpo" / "report.html").is_file()
    assert sorted(path.name for path in work.iterdir()) == ["runs"]
    assert installed.files() == before
