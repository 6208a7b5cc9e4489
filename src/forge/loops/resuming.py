"""What a run refuses about its folders and its checkpoint, before any process is started.

Nothing here locks, changes or leaves anything.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from forge.config import CheckpointConfig, GRPOConfig
from forge.config.base import ConfigModel
from forge.config.fields import move_old_keys
from forge.config.loading import FILE_NAME, to_plain
from forge.config.yaml_text import read_yaml
from forge.errors import CheckpointError, ConfigError
from forge.loops.run_paths import HasRunPaths, checkpoint_dir, run_dir
from forge.observe import read_jsonl
from forge.observe.clock import monotonic_s
from forge.observe.notebook import is_notebook
from forge.rollout.ledger import check_ledger, read_ledger
from forge.trainer.checkpoint_folder import (
    CheckpointInfo,
    WriterLock,
    check_checkpoint,
    find_checkpoint,
    readable_checkpoints,
)
from forge.trainer.schedules import is_due

_log = logging.getLogger("forge.loops")
LEDGER_NAME, METRICS_NAME = "ledger.jsonl", "metrics.jsonl"
LoopName = Literal[
    "reinforcement learning", "fine-tuning", "preference optimisation", "reward-model training", "distillation"
]
"""The kinds of loops, by the names that messages and checkpoints have for them."""
_STATES: Final[Mapping[LoopName, Mapping[str, type]]] = {
    "reinforcement learning": {"step": int, "buffer": dict, "prompts": str, "evaluations": list},
    "fine-tuning": {"data": dict},
    "preference optimisation": {"data": dict},
    "reward-model training": {"data": dict},
    "distillation": {"data": dict},
}
"""What a loop stores with a checkpoint, by the name of the loop: keys and types that a resume relies on."""
_ARGUMENTS: Final = ("args", "task_args", "engine_args", "columns")
"""Keys whose value is a mapping with names of the user's own."""
_BUFFER: Final[Mapping[str, type]] = {"next_number": int, "pending": list, "num_taken": int}


def check_folders(config: HasRunPaths) -> CheckpointInfo | None:
    """Refuse folders that a run cannot use, and return the checkpoint that it resumes from; None to start anew.

    Refused are folders that cannot be written, that another run writes to, or that hold another run, metrics that
    cannot be read, and checkpoints that are missing or damaged.
    """
    own, checkpoints = run_dir(config), checkpoint_dir(config)
    _check_writable(own, "run.output_dir")
    _check_writable(checkpoints, "checkpointing.output_dir")
    WriterLock.check(own)
    WriterLock.check(checkpoints)
    found = find_checkpoint(checkpoints, resume=config.checkpointing.resume)
    _check_other_run(own, found)
    if found is not None:
        check_checkpoint(found)
    metrics = own / METRICS_NAME
    if config.metrics.jsonl and metrics.is_file():
        for _ in read_jsonl(metrics):
            pass  # refuses what the run could not continue
    return found


def saved_name(loop: LoopName) -> dict[str, str]:
    """Return what a supervised loop stores with a checkpoint to say which it was; fine-tuning is the one unnamed."""
    return {} if loop == "fine-tuning" else {"loop": loop}


def resumed_state(info: CheckpointInfo, loop: LoopName) -> Mapping[str, Any]:
    """Return what a loop stored with a checkpoint. Refuse a checkpoint that another loop, or none of ours, made."""
    state = info.extra.get("caller")
    if _is_state_of(state, loop) and (loop != "reinforcement learning" or _has(state["buffer"], _BUFFER)):
        return state
    made_by = next((name for name in _STATES if name != loop and _is_state_of(state, name)), None)
    raise CheckpointError(
        "this run cannot resume from the checkpoint: it does not hold the state of such a run",
        path=str(info.path),
        value=f"a checkpoint of {made_by}" if made_by else "no state of a run",
        rule=f"a checkpoint of {loop}",
        repair="name one of this run's checkpoints; to start from the weights of another run, set model.path to the "
        "folder `hf` next to its checkpoints, and leave --resume out",
    )


def _is_state_of(state: object, loop: LoopName) -> TypeGuard[Mapping[str, Any]]:
    if not _has(state, _STATES[loop]):
        return False
    return loop == "reinforcement learning" or state.get("loop", "fine-tuning") == loop


def _has(state: object, keys: Mapping[str, type]) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(state, Mapping) and all(isinstance(state.get(key), kind) for key, kind in keys.items())


def _check_writable(folder: Path, path: str) -> None:
    """Create a file without a name where the folder is or would be: permissions alone tell root nothing."""
    place = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            return
    except OSError as error:
        raise ConfigError(
            "the run cannot write to its folder",
            path=path,
            value=str(folder),
            rule=f"a folder that can be written; no file can be created in {place}: {error.strerror}",
            repair="choose another one, or correct its permissions",
        ) from None


def _check_other_run(folder: Path, found: CheckpointInfo | None) -> None:
    """Refuse to write into a folder with the records of a run that has checkpoints or a final model, unless it resumes
    from one of that run's checkpoints: its metrics and ledger would be moved aside, and its report overwritten."""
    earlier = _earlier_config(folder)
    if earlier is None:
        return
    section = earlier.get("checkpointing")
    given = section.get("output_dir") if isinstance(section, Mapping) else None
    theirs = Path(given) if given and isinstance(given, str) else folder / "checkpoints"
    if found is not None and found.path.parent.resolve() == theirs.resolve():
        return
    infos = readable_checkpoints(theirs)
    if not infos and not (theirs / "hf").is_dir():
        return
    raise CheckpointError(
        "This folder holds another run, whose metrics, ledger and report would be replaced.",
        path=str(folder),
        value=str(infos[-1].path if infos else theirs / "hf"),
        rule="a run that has checkpoints or a final model is only changed by resuming it from one of its checkpoints",
        repair=f"run.name=NAME for a new run, or --resume with checkpointing.output_dir={theirs} to continue that one",
    )


def _earlier_config(folder: Path) -> Mapping[str, Any] | None:
    """Return the configuration of the run that last wrote into a folder; None if there was none."""
    path = folder / FILE_NAME
    try:
        document = read_yaml(path.read_text(encoding="utf-8"), source=str(path))
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        _log.warning("%s cannot be read, so its configuration cannot be compared: %s", path, error)
        return {}
    return document.data if isinstance(document.data, Mapping) else {}


def report_changes(config: ConfigModel, folder: Path, *, other_than: Collection[str] = ()) -> None:
    """Log which keys differ from the configuration of the run that is resumed in `folder`, apart from those that are
    reported otherwise."""
    earlier = _earlier_config(folder)
    if earlier:
        for _ in move_old_keys(type(config), earlier):
            pass  # a run of an earlier release is compared by today's names
        before, now = _flat(earlier), _flat(to_plain(config))
        changed = [
            f"{key}: {_shown(before, key)} -> {_shown(now, key)}"
            for key in (*now, *(key for key in before if key not in now))
            if _differs(key, before, now) and key not in ("checkpointing.resume", *other_than)
        ]
        if changed:
            _log.warning("keys that differ from the run that is resumed: %s", ", ".join(changed))


def _differs(key: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a key changed. One that only one of two releases knows did not; an argument that was added to a
    function or taken from it did."""
    if key in before and key in now:
        return bool(before[key] != now[key])
    return any(f".{name}." in key for name in _ARGUMENTS)


def _shown(flat: Mapping[str, Any], key: str) -> str:
    return repr(flat[key]) if key in flat else "not set"


def _flat(document: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in document.items():
        key = f"{prefix}{name}"
        inner = dict(enumerate(value)) if isinstance(value, list) else value
        found |= _flat(inner, f"{key}.") if isinstance(inner, Mapping) and inner else {key: value}
    return found


# ---- Reinforcement learning -----------------------------------------------------------------------------------------


def group_keys(config: GRPOConfig) -> dict[str, int]:
    """Return the keys that say what a group is and how often it is learned from. A checkpoint keeps them."""
    keys = {"rollout.group_size": config.rollout.group_size, "rollout.iterations": config.rollout.iterations}
    if config.algorithm.has_critic:
        keys |= {"critic.warmup_steps": config.critic.warmup_steps, "critic.iterations": config.critic_iterations}
    return keys


def check_continues(config: GRPOConfig, extra: Mapping[str, Any], *, prompts_digest: str) -> None:
    """Refuse a checkpoint that a run with this configuration would not continue but mix with something else.

    `extra` is what the loop stored with the checkpoint.
    """
    if extra["prompts"] != prompts_digest:
        raise CheckpointError(
            "the prompts are not those of the run that is resumed",
            path="prompts.sources",
            value=prompts_digest,
            rule=f"the digest {extra['prompts']}, as when the checkpoint was made",
            repair="use the same sources and seed, or start a new run under another run.name",
        )
    most = config.training.max_steps
    if most is not None and most < int(extra["step"]):
        raise CheckpointError(
            "the run has already taken more steps than training.max_steps allows",
            path="training.max_steps",
            value=most,
            rule=f"at least {extra['step']}, the steps that the checkpoint has taken",
            repair="raise it; or name an earlier checkpoint's folder in checkpointing.resume",
        )
    before = extra.get("group", {})
    for key, value in group_keys(config).items():
        if before.get(key, value) != value:
            raise CheckpointError(
                "a resumed run would learn from other groups than before",
                path=key,
                value=value,
                rule=f"{before[key]}, as when the checkpoint was made",
                repair=f"set {key}={before[key]}; for a run with another value, export the weights, set model.path to "
                "them, and choose another run.name",
            )


def check_resumed_ledger(folder: Path, extra: Mapping[str, Any]) -> None:
    """Refuse a ledger that lacks a group, or has one twice, up to the step of a checkpoint. No file is no error."""
    path = folder / LEDGER_NAME
    if not path.exists():
        return
    step, buffer = int(extra["step"]), extra["buffer"]
    check_ledger(
        (line for line in read_ledger(path) if line.step <= step),
        pending=buffer["pending"],
        next_number=int(buffer["next_number"]),
        path=path,
        before=extra.get("ledger_before"),
    )


def ledger_before(config: GRPOConfig, extra: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return which groups the ledger of this run does not hold, because another run's has them or it is gone."""
    folder = run_dir(config)
    if (folder / LEDGER_NAME).exists():
        known: dict[str, Any] | None = extra.get("ledger_before")
        return known
    _log.warning("%s has no %s: the new one will not contain what came before this resume", folder, LEDGER_NAME)
    return {"next_number": extra["buffer"]["next_number"], "pending": extra["buffer"]["pending"]}


class SaveRule:
    """Says when a checkpoint is due: every `save_interval` steps, and when `save_interval_s` seconds have passed since
    the last one."""

    def __init__(self, config: CheckpointConfig, *, clock: Callable[[], float] = monotonic_s) -> None:
        self._config, self._clock = config, clock
        self._last = clock()

    def is_due(self, step: int) -> bool:
        """Whether the state after this step is to be saved."""
        return is_due(step, self._config.save_interval) or (step > 0 and self.is_overdue())

    def is_overdue(self) -> bool:
        """Whether the last checkpoint is older than `save_interval_s`."""
        limit = self._config.save_interval_s
        return limit is not None and self._clock() - self._last >= limit

    def saved(self) -> None:
        """Count the seconds from now on."""
        self._last = self._clock()


def kept_steps(folder: Path) -> list[int]:
    """Return the steps of the run that there are checkpoints of."""
    return [int(info.extra.get("caller", {}).get("step", info.step)) for info in readable_checkpoints(folder)]


def saved_step(folder: Path) -> int | None:
    """Return the step that `--resume` continues after: that of the checkpoint completed last; None if there is none.

    A checkpoint that is still being written, or whose write failed, does not count.
    """
    infos = readable_checkpoints(folder)
    if not infos:
        return None
    caller = infos[-1].extra.get("caller", {})
    return int(caller.get("step", infos[-1].step))


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint completed last; None if there is none."""
    infos = readable_checkpoints(folder)
    return infos[-1].path if infos else None


def where_it_stopped(step: int, folder: Path) -> str:
    """Say after which step a run ended, and what `--resume` continues after."""
    saved = saved_step(folder)
    if saved is None:
        kept = "there is no checkpoint yet"
    elif is_notebook():
        kept = f"checkpointing.resume=auto continues after step {saved}"
    else:
        kept = f"--resume continues after step {saved}"
    return f"stopped after step {step}; {kept}"
