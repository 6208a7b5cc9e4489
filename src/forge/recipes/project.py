"""`forge new`: a small project of one's own that runs as it is: a program, a configuration, data or a task, and a test.

Tasks and tests are those of the recipes; what makes a project of them is here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forge._version import __version__
from forge.errors import ConfigError, did_you_mean
from forge.recipes.catalogue import apps_folder, recipes
from forge.recipes.copying import copied_text, files_of, write_files
from forge.recipes.project_text import GITIGNORE, MAIN, PYPROJECT, README


@dataclass(frozen=True, slots=True)
class ProjectTask:
    """What a project is about.

    Attributes:
        recipe: the recipe that it is made from.
        summary: what the model learns, behind "A tiny model learns".
        module: the file with the task; None where data in a file are all there is.
        writer: the function in it that writes the files of the task.
        change: what to change for a task of one's own, a line each.
        settings: keys of the configuration with other values than in the recipe, so that a run takes about a minute.
    """

    recipe: str
    summary: str
    module: str | None
    writer: str
    change: tuple[str, ...]
    settings: Mapping[str, str]


_LOCAL_FIRST: Final = re.compile(r"^(from (?!__future__)\w+ import [^\n]+\n)\n((?:from forge[^\n]*\n)+)", re.MULTILINE)
"""Imports as they are sorted in the recipes. In a project the task's module is the one that comes last."""
_REINFORCED = (
    "`sft.yaml` and the demonstrations: what the model is shown before it learns from the reward. With a model that "
    "knows something already (`model.path` in `grpo.yaml`) you need neither: `forge run grpo --config grpo.yaml`.",
    "`grpo.yaml`: every key is explained by `forge config show --origins grpo.yaml` and the configuration reference.",
)
TASKS: Final[Mapping[str, ProjectTask]] = {
    "digits": ProjectTask(
        "grpo/tiny",
        "which is the largest, or the smallest, of four digits, from a reward alone",
        "digits",
        "write_task",
        (
            "`digits.py`: the questions, and the answers that only the reward sees.",
            "`rewards` in `grpo.yaml`: a built-in reward (`forge rewards` lists them), or a function of your own, "
            "`kind: my_rewards:score`, in a file `my_rewards.py` beside it.",
            *_REINFORCED,
        ),
        {"max_steps: 100": "max_steps: 40"},
    ),
    "tools": ProjectTask(
        "tools/grpo",
        "to answer with the help of a tool",
        "boxes",
        "write_files",
        (
            "`boxes.py`: `look` is the episode, an `async` function with the tool inside. It returns the reward.",
            *_REINFORCED,
        ),
        {"max_steps: 25": "max_steps: 12"},
    ),
    "environment": ProjectTask(
        "games/grpo",
        "to act over several turns in an environment: it walks to a treasure",
        "treasure",
        "write_files",
        (
            "`treasure.py`: `Treasure` is the environment, with `reset`, `step` and `close`. Its observations carry "
            "the rewards.",
            *_REINFORCED,
        ),
        {"max_steps: 30": "max_steps: 16"},
    ),
    "sft": ProjectTask(
        "sft/tiny",
        "small sums from conversations",
        None,
        "",
        (
            '`sums.jsonl`: one conversation on each line, `{"messages": [{"role": "user", …}, …]}`.',
            "`model` in `train.yaml`: `path: models/NAME` after `forge download REPO --output-dir models/NAME`.",
        ),
        {},
    ),
    "preferences": ProjectTask(
        "dpo/tiny",
        "from pairs of answers which of two orders of numbers was asked for",
        None,
        "",
        (
            '`orders.jsonl`: one pair on each line, `{"prompt": …, "chosen": …, "rejected": …}`.',
            "`preference.kind` in `train.yaml`: `dpo`, `ipo`, `kto`, `orpo` or `simpo`.",
            "`model` in `train.yaml`: `path: models/NAME` after `forge download REPO --output-dir models/NAME`.",
        ),
        {},
    ),
}


def make_project(folder: Path, task: str) -> list[Path]:
    """Write a new project into a folder that is empty or does not exist, and return its files."""
    if task not in TASKS:
        raise ConfigError(
            "there is no such task",
            path="--task",
            value=task,
            rule=f"one of {', '.join(TASKS)}",
            repair=did_you_mean(task, TASKS) or "choose one of them",
        )
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            "a project needs a folder of its own",
            path="FOLDER",
            value=str(folder),
            rule="a folder that is empty, or that does not exist",
            repair="name another one",
        )
    return write_files(folder, contents_of(TASKS[task], command=run_command(task), name=project_name(folder)))


def run_command(task: str) -> str:
    """Return the command that runs a project, inside its folder."""
    return "forge run main.py --config train.yaml" if TASKS[task].module is None else "python main.py"


def project_name(folder: Path) -> str:
    """Return the project's name, as packages are named."""
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    if not name:
        raise ConfigError(
            "a project is named after its folder",
            path="FOLDER",
            value=str(folder),
            rule="a name with a letter or a digit in it",
            repair="choose another name",
        )
    return name


def contents_of(task: ProjectTask, *, command: str, name: str) -> dict[str, str]:
    """Return the files of a project by their path in it."""
    recipe = recipes()[task.recipe]
    files = files_of(recipe)
    config = "train.yaml" if task.module is None else "grpo.yaml"
    found = {}
    for file, source in files.sources.items():
        if file == "README.md":
            continue
        place = f"tests/{file}" if file.startswith("test_") else config if source == recipe.config else file
        text = copied_text(source, files)
        if source.suffix == ".yaml":
            text = _config_text(text, task, name=name, place=place)
        found[place] = _LOCAL_FIRST.sub(r"\2\n\1", text)
    if task.module is not None:
        shared = apps_folder() / "warm_start.py"
        found["warm_start.py"] = shared.read_text(encoding="utf-8")
        found["main.py"] = MAIN.format(summary=task.summary, module=task.module, writer=task.writer)
    else:
        found["main.py"] = found["main.py"].replace(recipe.config.name, config)
    changes = "\n".join(f"- {line}" for line in task.change)
    readme = README.format(name=name, summary=task.summary, command=command, config=config, changes=changes)
    found |= {
        "README.md": readme,
        ".gitignore": GITIGNORE,
        "pyproject.toml": PYPROJECT.format(name=name, version=__version__),
    }
    return dict(sorted(found.items()))


def _config_text(text: str, task: ProjectTask, *, name: str, place: str) -> str:
    """Return a configuration of the project: without the recipe's comment, in folders of its own, and shorter."""
    lines = text.splitlines(keepends=True)
    start = next(index for index, line in enumerate(lines) if not line.startswith("#"))
    body = re.sub(r"runs/(?:quickstart|[a-z]+-0)(?=[/\s])", f"runs/{name}-0", "".join(lines[start:]))
    for old, new in task.settings.items() if place != "sft.yaml" else ():
        body = body.replace(old, new)
    body = re.sub(r"^  name: \S+-tiny$", f"  name: {name}", body, flags=re.MULTILINE)
    what = (
        "What the model is shown first: how an answer is written."
        if place == "sft.yaml"
        else f"A tiny model learns {task.summary}."
    )
    return f"# {what}\n{body}"
