"""What pyproject.toml cannot say: a wheel holds a copy of `apps/`, and its description has links that work anywhere."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).resolve().parent
REPOSITORY = "https://github.com/torchforge/torchforge"
NOT_INSTALLED = {"runs", "diagnosis"}
"""Folders of `apps/` that are not installed: what runs leave, and runs that fail on purpose, for a tutorial."""
SUFFIXES = {".jsonl", ".md", ".py", ".toml", ".yaml"}


def recipe_files() -> list[Path]:
    """Return the files of `apps/` that are installed, relative to this folder."""
    found = (path for path in sorted((HERE / "apps").rglob("*")) if path.suffix in SUFFIXES)
    inside = (path.relative_to(HERE) for path in found if path.is_file())
    return [path for path in inside if not NOT_INSTALLED & set(path.parts)]


def description() -> str:
    """Return the README. A link into the repository becomes one that also works on a package index."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?!https?://|#)([^)\s]+)\)", rf"]({REPOSITORY}/blob/main/\1)", text)


class BuildWithRecipes(build_py):
    """Copies `apps/` into the package `forge.recipes`. An editable install reads it where it is."""

    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(Path(self.build_lib) / "forge", ignore_errors=True)  # files that have been removed since
        super().run()
        if not self.editable_mode:
            for path in recipe_files():
                target = self._target(path)
                self.mkpath(str(target.parent))
                self.copy_file(str(HERE / path), str(target))

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        copies = [] if self.editable_mode else [str(self._target(path)) for path in recipe_files()]
        return [*super().get_outputs(include_bytecode), *copies]

    def get_source_files(self) -> list[str]:
        """Return what a source distribution holds."""
        return [*super().get_source_files(), *map(str, recipe_files())]

    def _target(self, path: Path) -> Path:
        return Path(self.build_lib) / "forge" / "recipes" / path


setup(
    cmdclass={"build_py": BuildWithRecipes},
    long_description=description(),
    long_description_content_type="text/markdown",
)
