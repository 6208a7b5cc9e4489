"""`forge run --dry-run` and `forge config check`: one check of a run, before anything is started."""

from __future__ import annotations

import ast
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from forge.errors import ConfigError
from forge.recipes.stand_ins import StandIns, stand_ins

if TYPE_CHECKING:
    from forge.config import ForgeConfig, Problem
    from forge.loops.dry_run import DryRun

_READER = "from_command_line"
_MODULE = "__dry_run__"
_DEFINITIONS = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(frozen=True, slots=True)
class Chosen:
    """The schema that a configuration is checked against, and why it is this one."""

    schema: type[ForgeConfig]
    why: str

    def __str__(self) -> str:
        import forge.config

        name, module = self.schema.__qualname__, self.schema.__module__
        if getattr(forge.config, name, None) is self.schema:
            module = "forge.config"
        return f"{name if module == _MODULE else f'{module}:{name}'} ({self.why})"


def dry_run_script(
    script: Path, arguments: Sequence[str], *, num_ranks: int | None, settings: Mapping[str, Any] | None = None
) -> int:
    """Print what `forge run SCRIPT …` would do, or everything that keeps it from starting. Return the exit code.

    `settings` are those of a recipe: what it needs and is not there yet is represented by stand-ins.
    """
    from forge.config import add_module_folders
    from forge.config.command_line import read_arguments

    sys.path.insert(0, str(script.resolve().parent))
    files, overrides = read_arguments(arguments)
    add_module_folders(files)
    schema = schema_of_script(script)
    chosen = choose_schema(files, overrides) if schema is None else Chosen(schema, f"named in {script}")
    with stand_ins(settings) as found:
        return check(chosen, files, [*overrides, *found.overrides], num_ranks=num_ranks, found=found)


def check(
    chosen: Chosen,
    files: Sequence[str],
    overrides: Sequence[str],
    *,
    num_ranks: int | None = None,
    found: StandIns | None = None,
) -> int:
    """Check a configuration against its schema and as a run, and print the result. Return the exit code."""
    from forge.config import load
    from forge.config.command_line import other_program

    found = found or StandIns()
    try:
        config = load(chosen.schema, files=files, overrides=overrides)
    except ConfigError as error:
        lines = [str(error), other_program(chosen.schema, files, overrides), f"(The schema is {chosen}.)"]
        print(found.named("\n".join(filter(None, lines))), file=sys.stderr)
        return 2
    if not _is_run(config):
        print(f"The keys are valid. Schema: {chosen}.")
        print("Nothing else was checked: this schema is not one of a run that the library knows. Name the schema with")
        print("`forge config check --schema MODULE:CLASS`, or the program: `forge run SCRIPT --config FILE --dry-run`.")
        return 0
    from forge.loops.dry_run import dry_run

    result = dry_run(config, num_ranks=num_ranks)
    if result.problems:
        print(found.named(_refused(chosen, result.problems)), file=sys.stderr)
        return 2
    first = [("before", step.command) for step in found.steps]
    print(found.named(_accepted(chosen, result, first)), end="")
    return 0


def choose_schema(files: Sequence[str], overrides: Sequence[str]) -> Chosen:
    """Return the schema that the sections of a configuration point to."""
    from forge.config import ForgeConfig
    from forge.config.command_line import SCHEMAS, detect_kind

    found = detect_kind(files, overrides)
    if not found.evidence:
        return Chosen(ForgeConfig, "no section says which kind of run it is; --schema names another")
    by = f"by its sections: {', '.join(found.evidence)}"
    if found.others:
        by += f"; {' and '.join(SCHEMAS[kind].__name__ for kind in found.others)} would fit as well"
    return Chosen(found.schema, f"{by}; --schema names another")


def schema_of_script(script: Path) -> type[ForgeConfig] | None:
    """Return the schema that a script gives to `from_command_line`; None where that cannot be told.

    Of the script only imports and definitions are run, and nothing that it does.
    """
    from forge.config import ForgeConfig

    try:
        tree = ast.parse(script.read_text(encoding="utf-8"), filename=str(script))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise _unusable(script, error) from None
    asked = _asked_schema(tree)
    if asked is None:
        return None
    body: list[ast.stmt] = [node for node in tree.body if isinstance(node, _DEFINITIONS)]
    module = sys.modules[_MODULE] = ModuleType(_MODULE)  # where annotations of its classes are looked up
    module.__file__ = str(script)
    try:
        exec(compile(ast.Module(body, []), str(script), "exec", dont_inherit=True), vars(module))
        found = eval(compile(ast.Expression(asked), str(script), "eval"), vars(module))
    except NameError:
        return None
    except ImportError as error:
        raise _unusable(script, error) from None
    return found if isinstance(found, type) and issubclass(found, ForgeConfig) else None


def _asked_schema(tree: ast.Module) -> ast.expr | None:
    """The first argument of the first call of `from_command_line`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            given = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "schema")]
            if name == _READER and given:
                return given[0]
    return None


def _unusable(script: Path, error: Exception) -> ConfigError:
    return ConfigError(
        "the script cannot be run",
        path=str(script),
        rule=f"a Python file that can be read and whose imports succeed: {type(error).__name__}: {error}",
        repair="correct it, or install what it imports",
    )


def _is_run(config: ForgeConfig) -> bool:
    from forge.config.command_line import SCHEMAS

    return isinstance(config, tuple(SCHEMAS.values()))


def _refused(chosen: Chosen, problems: Sequence[Problem]) -> str:
    count = "a problem" if len(problems) == 1 else f"{len(problems)} problems"
    lines = [f"The run would not start. It has {count}:", *(f"  {problem}" for problem in problems)]
    return "\n".join([*lines, f"(The schema is {chosen}.)"])


def _accepted(chosen: Chosen, found: DryRun, first: Sequence[tuple[str, str]]) -> str:
    facts = [("schema", str(chosen)), *first, *found.facts, *(("warning", text) for text in found.warnings)]
    width = max(len(label) for label, _ in facts)
    lines = ["The configuration is valid, and the run would start:"]
    lines += [f"  {label:<{width}}  {text}" for label, text in facts]
    return "\n".join([*lines, "Nothing was started.\n"])
