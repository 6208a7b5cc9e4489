"""Python scripts that train with TRL: the keyword arguments of its configurations and trainers. Nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any, Final

from forge.errors import ConfigError
from forge.migration.python_source import Call, Scope, parse_python, scope_of, value_of
from forge.migration.records import Computed, Given
from forge.migration.trl.rewards import reward_names

CLASSES: Final[Mapping[str, str]] = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "sft": "SFTConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "reward": "RewardConfig",
}
_KIND_OF: Final = {name: kind for kind, name in CLASSES.items()} | {
    name.replace("Config", "Trainer"): kind for kind, name in CLASSES.items()
}
_EXPERIMENTAL: Final = (
    "ORPOConfig",
    "CPOConfig",
    "PPOConfig",
    "GKDConfig",
    "OnlineDPOConfig",
    "PRMConfig",
    "BCOConfig",
)
_LORA: Final = {
    "r": "lora_r",
    "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}
"""Arguments of PEFT's LoraConfig, and their names in TRL's ModelConfig."""
_LORA_DEFAULTS: Final = {"lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
_OWN_ARGUMENTS: Final = ("args", "model", "train_dataset", "eval_dataset", "peft_config", "reward_funcs")


def read_python(text: str, *, where: str, kind: str | None) -> tuple[str, dict[str, Given]]:
    """Return the kind of run that a script trains, and the keys that it gives.

    Raises `ConfigError` where it makes none of TRL's configurations, or several.
    """
    tree = parse_python(text, where=where)
    found = list(_calls(tree))
    configs = [call for call in found if call.last_name in CLASSES.values()]
    trainers = [call for call in found if call.last_name in _KIND_OF and call not in configs]
    if kind is not None:
        configs = [call for call in configs if _KIND_OF[call.last_name] == kind]
        trainers = [call for call in trainers if _KIND_OF[call.last_name] == kind]
    bare = [call for call in trainers if "args" not in call.kwargs]
    chosen = _one_kind(configs or bare, found, where=where)
    given: dict[str, Given] = {}
    for call in configs:
        given |= _arguments(call, where)
    given |= _later_values(tree, where)
    for call in trainers:
        given |= _trainer_arguments(call, where)
    return chosen, given | _dataset(found, tree, where)


def _one_kind(calls: list[Call], found: list[Call], *, where: str) -> str:
    kinds = sorted({_KIND_OF[call.last_name] for call in calls})
    if len(kinds) == 1:
        return kinds[0]
    names = ", ".join(CLASSES.values())
    other = next((call for call in found if call.last_name in _EXPERIMENTAL), None)
    if not kinds and other is not None:
        raise ConfigError(
            f"{other.last_name} cannot be imported.",
            path=f"{where}:{other.line}",
            value=other.last_name,
            rule=f"one of {names}",
            repair="write the configuration by hand: `forge algorithms` names what corresponds to an algorithm of TRL",
        )
    raise ConfigError(
        "The script makes no configuration of TRL." if not kinds else "The script makes several configurations.",
        path=where,
        value=kinds or None,
        rule=f"one call of {names}",
        repair=f"add --kind {'|'.join(kinds)}"
        if kinds
        else "name the YAML file or the shell script that has the values",
    )


def _later_values(tree: ast.Module, where: str) -> dict[str, Given]:
    """What is set after a configuration is made: `args.max_steps = 100`."""
    module = scope_of(tree.body)
    found: dict[str, Given] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    for body, scope in [(tree.body, module), *((each.body, scope_of(each.body, module)) for each in functions)]:
        for statement in body:
            if not isinstance(statement, ast.Assign):
                continue
            for target in statement.targets:
                if isinstance(target, ast.Attribute) and _is_config(target.value, scope):
                    value = _value(value_of(statement.value, scope))
                    found[target.attr] = Given(value, f"{where}:{statement.lineno}")
    return found


def _is_config(node: ast.expr, scope: Scope) -> bool:
    """Whether a name stands for one of TRL's configurations."""
    made = value_of(node, scope) if isinstance(node, ast.Name) else None
    return isinstance(made, Call) and made.last_name in CLASSES.values()


def _calls(tree: ast.Module) -> Iterator[Call]:
    """Yield every call of a script, with the names of the function around it, in the order of lines."""
    module = scope_of(tree.body)

    def walk(node: ast.AST, scope: Scope) -> Iterator[tuple[Call, Scope]]:
        for child in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                inner = scope_of(child.body, scope)
            if isinstance(child, ast.Call):
                value = value_of(child, scope)
                if isinstance(value, Call):
                    yield value, scope
            yield from walk(child, inner)

    for call, _ in sorted(walk(tree, module), key=lambda each: each[0].line):
        yield call


def _place(call: Call, key: str, where: str) -> str:
    return f"{where}:{call.lines.get(key, call.line)}"


def _arguments(call: Call, where: str) -> dict[str, Given]:
    """The arguments of a configuration; the first without a name is output_dir."""
    found = {key: Given(_value(value), _place(call, key, where)) for key, value in call.kwargs.items()}
    if call.args:
        found.setdefault("output_dir", Given(_value(call.args[0]), f"{where}:{call.line}"))
    return found


def _value(value: Any) -> Any:
    """A call in place of a value is computed when the script runs."""
    return Computed(str(value)) if isinstance(value, Call) else value


def _trainer_arguments(call: Call, where: str) -> dict[str, Given]:
    """What the trainer's own arguments say: the model, the rewards, the adapter."""
    found: dict[str, Given] = {}
    kwargs = dict(call.kwargs)
    if call.args:
        kwargs.setdefault("model", call.args[0])
    model = kwargs.get("model")
    if isinstance(model, Call) and model.last_name == "from_pretrained" and model.args:
        model = model.args[0]
    if model is not None:
        found["model_name_or_path"] = Given(_value(model), _place(call, "model", where))
    if "reward_funcs" in kwargs:
        names = reward_names(_reward_values(kwargs["reward_funcs"]))
        found["reward_funcs"] = Given(names, _place(call, "reward_funcs", where))
    peft = kwargs.get("peft_config")
    if isinstance(peft, Call) and peft.last_name == "LoraConfig":
        found |= _lora(peft, where)
    elif peft is not None:
        found["use_peft"] = Given(Computed(str(peft)), _place(call, "peft_config", where))
    for key in kwargs.keys() - set(_OWN_ARGUMENTS) - {"processing_class", "tokenizer", "callbacks"}:
        found[f"trainer.{key}"] = Given(_value(kwargs[key]), _place(call, key, where))
    return found


def _reward_values(value: Any) -> Any:
    items = value if isinstance(value, list) else [value]
    return [
        str(each.args[0]) if isinstance(each, Call) and each.args and not each.name else _reward(each) for each in items
    ]


def _reward(value: Any) -> Any:
    """The name of a reward function: of one that a call makes, what is called."""
    return value.last_name if isinstance(value, Call) else value


def _lora(call: Call, where: str) -> dict[str, Given]:
    """The arguments of PEFT's LoraConfig, with its own defaults."""
    found = {key: Given(value, f"{where}:{call.line}") for key, value in _LORA_DEFAULTS.items()}
    found["use_peft"] = Given(True, f"{where}:{call.line}")
    for key, value in call.kwargs.items():
        found[_LORA.get(key, f"peft_config.{key}")] = Given(_value(value), _place(call, key, where))
    return found


def _dataset(calls: list[Call], tree: ast.Module, where: str) -> dict[str, Given]:
    """The dataset, where the script loads one: `load_dataset("owner/name", "config", split="train")`."""
    loads = [call for call in calls if call.last_name == "load_dataset" and call.args]
    names = {str(call.args[0]) for call in loads}
    if len(names) != 1 or not isinstance(loads[0].args[0], str):
        return {}
    call = loads[0]
    place = f"{where}:{call.line}"
    found = {"dataset_name": Given(call.args[0], place)}
    config = call.args[1] if len(call.args) > 1 else call.kwargs.get("name")
    if isinstance(config, str):
        found["dataset_config"] = Given(config, place)
    split = call.kwargs.get("split")
    if isinstance(split, str) and "[" not in split:
        found["dataset_train_split"] = Given(split, place)
    changes = sorted(
        {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} & {"map", "filter", "select"}
    )
    if changes:
        found["dataset_changes"] = Given(", ".join(changes), place)
    return found
