"""What several projects name alike: models, folders of runs, metrics, LoRA."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, Final, get_args

from forge.config.adapter import TargetName
from forge.migration.records import Computed, Converted

_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")
_LINEAR: Final = frozenset(get_args(TargetName))
_LOCAL_SUFFIXES: Final = (".json", ".jsonl", ".parquet", ".csv", ".arrow", ".txt", ".gz")


def is_unreadable_path(text: str) -> bool:
    """Whether a path needs a shell or hydra to expand it; ours are taken as they are."""
    return text.startswith(("~", "hdfs://", "s3://")) or "$" in text


def is_hub_name(text: str) -> bool:
    """Whether a name is one of the Hugging Face hub, `owner/name`, and not a path."""
    return _HUB_NAME.fullmatch(text) is not None and not text.startswith(".") and not text.endswith(_LOCAL_SUFFIXES)


def model_values(name: Any, *, key: str, revision: str | None = None) -> Converted:
    """Return the section `model` for a name of the hub or a folder: ours loads from a folder."""
    if not isinstance(name, str) or not name:
        return Converted(todo={"model.path": f"{key} is not given: the folder of the model"})
    if not is_hub_name(name):
        if is_unreadable_path(name):
            return Converted(todo={"model.path": f"{key} is {name}: write the folder out, paths are not expanded"})
        return Converted({"model.path": name}, verdict="maps", note="")
    folder = f"models/{name.partition('/')[2]}"
    option = f" --revision {revision}" if revision not in (None, "main") else ""
    command = f"forge download {name}{option} --output-dir {folder}"
    return Converted({"model.hf_repo": name, "model.path": folder}, todo={"model.path": f"run `{command}`"})


def source_place(name: str) -> dict[str, str]:
    """Return the key of a source of data for a name: `hf_dataset` or `path`."""
    return {"hf_dataset": name} if is_hub_name(name) else {"path": name}


def run_name(text: str) -> str:
    """Return a text as the name of a run: letters, digits, `.`, `_` and `-`."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
    return plain[:128] or "run"


def run_folder(output_dir: str, name: str | None) -> dict[str, Any]:
    """Return `run.output_dir` and `run.name`, so that the run's folder is `output_dir`, or in it under its name."""
    if name:
        return {"run.output_dir": output_dir, "run.name": run_name(name)}
    path = PurePosixPath(output_dir)
    return {"run.output_dir": str(path.parent), "run.name": run_name(path.name)}


def adapter_targets(modules: Any) -> tuple[Any, str]:
    """Return `adapter.targets` for PEFT's target modules, and what is lost; null for what cannot be converted."""
    if modules == "all-linear":
        return "all", ""
    names = [modules] if isinstance(modules, str) else modules
    if not isinstance(names, Sequence) or not names:
        return None, ""
    kept = [name for name in names if name in _LINEAR]
    lost = [str(name) for name in names if name not in _LINEAR]
    note = f"only {', '.join(sorted(_LINEAR))} can have an adapter, not {', '.join(lost)}" if lost else ""
    if set(kept) == _LINEAR:
        return "all", note
    return kept or None, note


def sink_values(names: Iterable[Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of `metrics` for the names of loggers, and those that there is no sink for."""
    by_kind = ("mlflow", "trackio")
    known = {"wandb", "tensorboard", "console", "none", "file", "all", *by_kind}
    chosen = [str(name) for name in names]
    everything = "all" in chosen
    values: dict[str, Any] = {
        "metrics.wandb": everything or "wandb" in chosen,
        "metrics.tensorboard": everything or "tensorboard" in chosen,
    }
    if kinds := [{"kind": kind} for kind in by_kind if kind in chosen]:
        values["metrics.sinks"] = kinds
    return values, [name for name in chosen if name not in known]


def names_of(value: Any) -> list[Any]:
    """Return a value that may be one name, a list of names, or null as a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]


def dtype_name(value: Any) -> str | None:
    """Return a dtype by its name: `torch.bfloat16`, `bf16` and `bfloat16` are the same."""
    text = value.text if isinstance(value, Computed) else value
    if not isinstance(text, str):
        return None
    name = text.removeprefix("torch.").lower()
    short: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32"}
    return short.get(name, name)


def own_reward(name: str) -> str:
    """Return `module:function` for a reward of theirs: its own module, or `my_rewards` where it has none.

    A script that trains is never named: it would train when it is imported.
    """
    module, _, function = name.rpartition(".")
    return f"{module or 'my_rewards'}:{function}"
