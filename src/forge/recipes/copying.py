"""`forge copy`: a recipe as files of one's own, in one folder, with commands and paths that hold there."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forge._version import __version__
from forge.errors import ConfigError
from forge.recipes.catalogue import Recipe, apps_folder, read_list, recipes
from forge.recipes.command import merged, texts
from forge.recipes.inputs import all_steps

REPOSITORY: Final = "https://github.com/torchforge/torchforge"
_TEXT: Final = {".md", ".py", ".yaml"}
_LINK: Final = re.compile(r"\]\((?!https?://|#)([^)#\s]+)((?:#[^)\s]*)?)\)")


@dataclass(slots=True)
class Files:
    """What is copied.

    Attributes:
        program: the program of the recipe, which becomes `main.py`.
        sources: every file by the name that its copy has.
        configs: the recipes whose configurations are among them, by name.
    """

    program: Path
    sources: dict[str, Path] = field(default_factory=dict)
    configs: dict[str, Recipe] = field(default_factory=dict)

    def add(self, source: Path) -> None:
        """Add a file, with the test beside it and the modules of the recipes that it imports."""
        if source in self.sources.values():
            return
        test = source.with_name(f"test_{source.stem}.py")
        for each in (source, *([test] if test.is_file() else [])):
            assert each.name not in self.sources, f"{each} and {self.sources[each.name]} would have one name"
            self.sources[each.name] = each
        for module in _imported(source):
            self.add(module)

    def add_config(self, recipe: Recipe) -> None:
        """Add a configuration, and everything that it names or that makes what it names."""
        if recipe.name in self.configs:
            return
        self.configs[recipe.name] = recipe
        self.add(recipe.config)
        settings = merged([str(recipe.config)], [])
        for _, text in texts(settings):
            if (data := apps_folder().parent / text).is_file() and text.startswith("apps/"):
                self.add(data)
            module, colon, _ = text.partition(":")
            if colon and (beside := recipe.config.parent / f"{module}.py").is_file():
                self.add(beside)
        for step in all_steps(settings):
            if not step.is_run:
                self.add(apps_folder() / step.words[0])
        for name in (*(step.words[1] for step in all_steps(settings) if step.is_run), *_facts(recipe).get("needs", ())):
            self.add_config(recipes()[name])


def files_of(recipe: Recipe) -> Files:
    """Return what a copy of a recipe consists of: program, configurations, modules, data, tests and the README."""
    own = recipe.config.with_name("main.py")
    is_application = own.is_file() and not recipe.is_step and not _is_shared(own)
    files = Files(own if is_application else recipe.program)
    files.add(files.program)
    files.add_config(recipe)
    folders = (folder for folder in recipe.config.parents if folder.is_relative_to(apps_folder()))
    readme = next((folder / "README.md" for folder in folders if (folder / "README.md").is_file()), None)
    if readme is not None:
        files.add(readme)
    return files


def copy_recipe(recipe: Recipe, folder: Path) -> list[Path]:
    """Copy a recipe into a folder, which is made where needed, and return the new files. No file is overwritten."""
    files = files_of(recipe)
    contents = {name: copied_text(source, files) for name, source in files.sources.items()}
    if "README.md" in contents:
        contents["README.md"] = f"{_first_lines(recipe, files, folder)}\n{contents['README.md']}"
    return write_files(folder, contents)


def write_files(folder: Path, contents: Mapping[str, str]) -> list[Path]:
    """Write new files, in folders that are made where needed, and return their paths. No file is overwritten."""
    taken = sorted(name for name in contents if (folder / name).exists())
    if taken:
        raise ConfigError(
            "there are such files already, and none is overwritten",
            path="FOLDER",
            value=str(folder),
            rule=f"a folder without {', '.join(taken)}",
            repair="name another folder, or move them away",
        )
    written = []
    try:
        for name, text in contents.items():
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
            written.append(target)
    except OSError as error:
        raise ConfigError(
            "the files cannot be written",
            path="FOLDER",
            value=str(folder),
            rule=f"a folder that can be written: {error.strerror}",
            repair="name another one, or correct its permissions",
        ) from None
    return written


def commands(recipe: Recipe, files: Files) -> list[str]:
    """Return the commands that run a copy, inside its folder."""
    if files.program != recipe.program:
        return [_facts(recipe).get("command", "python main.py")]
    steps = [_moved(step.command, files) for step in all_steps(merged([str(recipe.config)], []))]
    return [*steps, f"forge run main.py --config {recipe.config.name}"]


# ---- Text that holds in the new place ------------------------------------------------------------------------------


def copied_text(source: Path, files: Files) -> str:
    """Return the text of a copied file."""
    text = source.read_text(encoding="utf-8")
    if source.suffix not in _TEXT:
        return text
    if source.suffix == ".md":
        text = _LINK.sub(lambda link: f"]({_target(source, link[1], files)}{link[2]})", text)
    return _moved(text, files)


def _moved(text: str, files: Files) -> str:
    """Return a text with the commands and paths of the recipes as those of the copy."""
    text = re.sub(r"python -m apps\.(\w+)\.main", r"python apps/\1/main.py", text)
    for name, recipe in files.configs.items():
        program = "main.py" if recipe.program == files.program else recipe.program.parent.name
        run = f"forge run {program} --config {recipe.config.name}"
        text = re.sub(rf"\bforge run {re.escape(name)}(?![\w/])", run, text)
        text = re.sub(rf"\b(forge \w+) {re.escape(name)}(?![\w/])", rf"\1 {recipe.config.name}", text)
    for name, source in files.sources.items():
        path = source.relative_to(apps_folder()).as_posix()
        text = re.sub(rf"(?<![\w./-])(?:apps/)?{re.escape(path)}(?![\w/])", name, text)
    return re.sub(r"(?:python|forge run) apps/(\w+)/main\.py", r"forge run \1", text)


def _target(source: Path, link: str, files: Files) -> str:
    """Return where a relative link of a README leads from the copy: to a file of the copy, or into the repository."""
    target = (source.parent / link).resolve()
    for name, each in files.sources.items():
        if each == target:
            return name
    place = target.relative_to(apps_folder().parent) if target.is_relative_to(apps_folder().parent) else None
    return link if place is None else f"{REPOSITORY}/blob/main/{place.as_posix()}"


def _first_lines(recipe: Recipe, files: Files, folder: Path) -> str:
    lines = [f"A copy of the recipe `{recipe.name}` of TorchForge {__version__}. To run it:", "", "```bash"]
    return "\n".join([*lines, f"cd {folder}", *commands(recipe, files), "```", ""])


# ---- What belongs to a recipe --------------------------------------------------------------------------------------


def _is_shared(program: Path) -> bool:
    """Whether a program runs every configuration of one kind, and is not an application of its own."""
    from forge.config.command_line import SCHEMAS, program_of

    return program.parent in {apps_folder() / program_of(kind) for kind in SCHEMAS}


def _facts(recipe: Recipe) -> Mapping[str, Any]:
    found: Mapping[str, Any] = read_list()["copies"].get(recipe.name, {})
    return found


def _imported(source: Path) -> Iterator[Path]:
    """Yield the files of the recipes that a program imports: beside it, or in a folder above it."""
    if source.suffix != ".py":
        return
    folders = [folder for folder in source.parents if folder.is_relative_to(apps_folder())]
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
        for name in names:
            yield from [folder / f"{name}.py" for folder in folders if (folder / f"{name}.py").is_file()][:1]
