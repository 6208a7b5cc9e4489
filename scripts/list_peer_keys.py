"""List the configuration keys of another project, with their defaults, as `forge import` knows them.

    pip download --no-deps trl==1.16.0 transformers==5.19.0 verl==0.9.1 torchtitan==0.3.0
    python scripts/list_peer_keys.py trl trl-1.16.0-*.whl transformers-5.19.0-*.whl > src/forge/migration/keys/trl.json
    python scripts/list_peer_keys.py verl verl-0.9.1-*.whl > src/forge/migration/keys/verl.json
    python scripts/list_peer_keys.py titanrl torchtitan-0.3.0-*.whl > src/forge/migration/keys/titanrl.json

Sources are read, never imported or run: names, and defaults as far as they are literals. Another default is kept as its
text, `{"text": "default_optim"}`. A wheel may also be a folder that it is installed in.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

TRL_CLASSES = {
    "GRPOConfig": "trl/trainer/grpo_config.py",
    "RLOOConfig": "trl/trainer/rloo_config.py",
    "SFTConfig": "trl/trainer/sft_config.py",
    "DPOConfig": "trl/trainer/dpo_config.py",
    "KTOConfig": "trl/trainer/kto_config.py",
    "RewardConfig": "trl/trainer/reward_config.py",
    "ModelConfig": "trl/trainer/model_config.py",
    "ScriptArguments": "trl/scripts/utils.py",
    "DatasetMixtureConfig": "trl/scripts/utils.py",
    "DatasetConfig": "trl/scripts/utils.py",
    "GRPOScriptArguments": "trl/scripts/grpo.py",
}
TITANRL_CHOICES = {
    "GRPOLoss": "torchtitan.experiments.rl.losses.grpo",
    "DAPOLoss": "torchtitan.experiments.rl.losses.dapo",
    "ChunkedLossWrapper": "torchtitan.components.loss",
    "CrossEntropyLoss": "torchtitan.components.loss",
    "SelectiveAC": "torchtitan.distributed.activation_checkpoint",
    "FullAC": "torchtitan.distributed.activation_checkpoint",
    "MemoryBudgetAC": "torchtitan.distributed.activation_checkpoint",
    "StickySessionRoutingStrategy": "torchtitan.experiments.rl.routing.strategies",
    "AdvantageEstimator": "torchtitan.experiments.rl.rollout.advantage",
    "TokenEnv": "torchtitan.experiments.rl.environment.token",
    "Rubric": "torchtitan.experiments.rl.rubrics.rubric",
}
"""Classes that one of several may be chosen from in a configuration, and where they are."""

Read = Callable[[str], str | None]
Fields = dict[str, Any]


def reader(places: list[Path]) -> Read:
    """Return a function that reads a file by its path inside the wheels or folders; None where there is none."""
    wheels = [zipfile.ZipFile(place) for place in places if place.is_file()]
    folders = [place for place in places if place.is_dir()]

    def read(name: str) -> str | None:
        for wheel in wheels:
            if name in wheel.namelist():
                return wheel.read(name).decode()
        for folder in folders:
            if (folder / name).is_file():
                return (folder / name).read_text(encoding="utf-8")
        return None

    return read


def needed(read: Read, name: str) -> str:
    text = read(name)
    if text is None:
        raise SystemExit(f"{name} is in none of the wheels")
    return text


def literal(node: ast.expr | None) -> Any:
    if node is None:
        return {"text": "required"}
    try:
        return ast.literal_eval(node)
    except ValueError:
        return {"text": ast.unparse(node)}


def default_of(value: ast.expr | None) -> ast.expr | None:
    """The expression of a default: of `field(default=…)`, of `field(default_factory=lambda: …)`, or of the value."""
    if isinstance(value, ast.Call) and getattr(value.func, "id", None) == "field":
        given = {word.arg: word.value for word in value.keywords}
        factory = given.get("default_factory")
        if isinstance(factory, ast.Lambda):
            return factory.body
        if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
            return ast.parse("[]" if factory.id == "list" else "{}", mode="eval").body
        return given.get("default", factory)
    return value


def class_node(tree: ast.Module, name: str) -> ast.ClassDef:
    """The class `Outer` or `Outer.Inner` of a module."""
    body: list[ast.stmt] = tree.body
    found: ast.ClassDef | None = None
    for part in name.split("."):
        found = next((node for node in body if isinstance(node, ast.ClassDef) and node.name == part), None)
        if found is None:
            raise SystemExit(f"there is no class {name}")
        body = found.body
    assert found is not None
    return found


def own_fields(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    for statement in node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if "ClassVar" not in ast.unparse(statement.annotation):
            yield statement.target.id, statement


# ---- TRL


def trl_fields(read: Read, file: str, name: str) -> Fields:
    node = class_node(ast.parse(needed(read, file)), name)
    return {key: literal(default_of(each.value)) for key, each in own_fields(node)}


def list_trl(read: Read) -> dict[str, Fields]:
    common = trl_fields(read, "transformers/training_args.py", "TrainingArguments")
    groups = {"TrainingArguments": common | trl_fields(read, "trl/trainer/base_config.py", "_BaseConfig")}
    for name, file in TRL_CLASSES.items():
        groups[name] = trl_fields(read, file, name)
    return groups


# ---- verl


def flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from flat(item, f"{path}.{key}" if path else str(key))
    elif not path.endswith("_target_"):
        yield path, value


def list_verl(read: Read) -> dict[str, Fields]:
    """The keys of the trainer with FSDP, and those that the one with Megatron has besides."""
    found: dict[str, Fields] = {}
    for name in ("ppo_trainer", "ppo_megatron_trainer"):
        text = needed(read, f"verl/trainer/config/_generated_{name}.yaml")
        keys = dict(flat(yaml.safe_load(text)))
        found[name] = {key: value for key, value in keys.items() if key not in found.get("ppo_trainer", {})}
    return found


# ---- TitanRL


class Titan:
    """The configuration classes of torchtitan, from their sources."""

    def __init__(self, read: Read) -> None:
        self._read = read

    def tree(self, module: str) -> ast.Module:
        path = module.replace(".", "/")
        text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        if text is None:
            raise SystemExit(f"there is no module {module}")
        return ast.parse(text)

    def find(self, module: str, name: str) -> tuple[str, ast.ClassDef] | None:
        """Where a class that a module names is defined; None for one that is not torchtitan's."""
        tree, outer = self.tree(module), name.split(".")[0]
        if any(isinstance(node, ast.ClassDef) and node.name == outer for node in tree.body):
            return module, class_node(tree, name)
        for node in tree.body:
            original = next(
                (each.name for each in getattr(node, "names", ()) if (each.asname or each.name) == outer), None
            )
            if not isinstance(node, ast.ImportFrom) or original is None:
                continue
            origin, rest = self._origin(module, node), name.split(".")[1:]
            if not origin.startswith("torchtitan"):
                return None
            if self._is_module(f"{origin}.{original}"):
                return self.find(f"{origin}.{original}", ".".join(rest))
            return self.find(origin, ".".join([original, *rest]))
        return None

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        """The module that an import of another one names."""
        if not node.level:
            return str(node.module)
        package = module if self._read(f"{module.replace('.', '/')}/__init__.py") else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return ".".join(filter(None, [package, node.module]))

    def _is_module(self, module: str) -> bool:
        path = module.replace(".", "/")
        return any(self._read(name) is not None for name in (f"{path}.py", f"{path}/__init__.py"))

    def fields(self, module: str, name: str) -> Iterator[tuple[str, str, ast.AnnAssign]]:
        """The fields of a class, those of its bases first, each with the module that it stands in."""
        found = self.find(module, name)
        if found is None:
            return
        place, node = found
        own = dict(own_fields(node))
        for base in node.bases:
            for where, key, each in self.fields(place, ast.unparse(base)):
                if key not in own:
                    yield where, key, each
        for key, each in own.items():
            yield place, key, each

    def flat(self, module: str, name: str, path: str = "") -> Iterator[tuple[str, Any]]:
        """Every leaf below a class, by its dotted path; a section that is chosen by its class is a leaf as well."""
        for where, key, each in self.fields(module, name):
            dotted = f"{path}.{key}" if path else key
            section = self._section(where, each)
            if section is None:
                yield dotted, literal(default_of(each.value))
                continue
            place, class_name = section
            below = list(self.flat(place, class_name, dotted))
            if not below or class_name.partition(".")[0] in TITANRL_CHOICES:
                yield dotted, {"text": class_name}
            yield from below

    def _section(self, module: str, each: ast.AnnAssign) -> tuple[str, str] | None:
        """The class of a field that is a section of its own: that of its default, or the one it is annotated with."""
        default = default_of(each.value)
        named = default.func if isinstance(default, ast.Call) else default
        for candidate in (named, each.annotation):
            if isinstance(candidate, ast.Name | ast.Attribute):
                text = ast.unparse(candidate)
                if re.fullmatch(r"(\w+\.)?[A-Z]\w*(\.Config)?", text) and self.find(module, text) is not None:
                    return module, text
        return None


def list_titanrl(read: Read) -> dict[str, Fields]:
    titan = Titan(read)
    groups = {"Controller": dict(titan.flat("torchtitan.experiments.rl.controller", "Controller.Config"))}
    for name, module in TITANRL_CHOICES.items():
        groups[name] = dict(titan.flat(module, f"{name}.Config"))
    tree = titan.tree("torchtitan.components.optimizer.optimizer")
    groups["default_adamw"] = default_adamw(tree)
    return groups


def default_adamw(tree: ast.Module) -> Fields:
    """The keyword arguments of AdamW that `default_adamw` gives, and its own learning rate."""
    function = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "default_adamw")
    kwargs = next(node for node in ast.walk(function) if isinstance(node, ast.Dict))
    found = {
        str(literal(key)): literal(value)
        for key, value in zip(kwargs.keys, kwargs.values, strict=True)
        if key is not None
    }
    return found | {"lr": literal(function.args.defaults[0])}


LISTS: Mapping[str, Callable[[Read], dict[str, Fields]]] = {
    "trl": list_trl,
    "verl": list_verl,
    "titanrl": list_titanrl,
}


def version_of(place: Path) -> str:
    if place.is_dir():
        raise SystemExit("a folder has no version: give it with --version")
    return place.name.split("-")[1]


def listed(project: str, places: list[Path], *, version: str) -> dict[str, Any]:
    """What stands in the file of a project."""
    return {"project": project, "version": version, "groups": LISTS[project](reader(places))}


def main() -> None:
    words = sys.argv[1:]
    version = words.pop(words.index("--version") + 1) if "--version" in words else None
    project, *names = [word for word in words if word != "--version"]
    places = [Path(name) for name in names]
    found = listed(project, places, version=version or version_of(places[0]))
    print(json.dumps(found, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
