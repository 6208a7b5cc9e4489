"""What a run's own configuration says about an evaluation of its checkpoints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forge.config import EvalConfig, load
from forge.config.loading import FILE_NAME
from forge.config.training import export_dtype
from forge.config.yaml_text import read_yaml
from forge.data.mixing import derive
from forge.errors import CheckpointError, ConfigError
from forge.trainer.checkpoint_folder import CheckpointInfo, list_checkpoints

_DROPPED: Final = ("weights", "update", "canary", "autoscale")


@dataclass(frozen=True, slots=True)
class EvaluatedRun:
    """A run's folder, as an evaluation sees it.

    Attributes:
        folder: the folder.
        config: its config.yaml as plain data.
        notes: what the evaluation does differently from the run.
    """

    folder: Path
    config: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def checkpoint_dir(self) -> Path:
        """Where its checkpoints are."""
        named = _section(self.config, "checkpointing").get("output_dir")
        return self.folder / "checkpoints" if named is None else Path(named)

    @property
    def precision(self) -> Any:
        """Its `distributed.precision`."""
        return _section(self.config, "distributed").get("precision", "float32")

    @property
    def dtype(self) -> str:
        """What its weights are exported in."""
        return export_dtype(str(self.precision))

    def find(self, step: int | None) -> CheckpointInfo | None:
        """Return the checkpoint of a step, or the newest; None for a run that left a model and no checkpoint."""
        infos = list_checkpoints(self.checkpoint_dir)
        if step is None:
            if infos:
                return infos[-1]
            if (self.checkpoint_dir / "hf" / "config.json").is_file():
                return None
        found = [info for info in infos if info.step == step]
        if found:
            return found[-1]
        steps = ", ".join(str(info.step) for info in infos)
        raise CheckpointError(
            "the run has no such checkpoint" if step is not None else "the run has no checkpoint and no model",
            path="eval.step",
            value=step,
            rule=f"one of {steps}" if steps else f"a checkpoint in {self.checkpoint_dir}",
            repair="leave --step out for the newest" if steps else "let the run save one: checkpointing.save_interval",
        )


def open_run(folder: str) -> EvaluatedRun:
    """Read the configuration of a run's folder."""
    path = Path(folder) / FILE_NAME
    if not path.is_file():
        raise ConfigError(
            "this is not the folder of a run",
            path="eval.run",
            value=folder,
            rule=f"a folder with the {FILE_NAME} that a run writes",
            repair="name <run.output_dir>/<run.name>; a model's folder is --model FOLDER",
        )
    document = read_yaml(path.read_text(encoding="utf-8", errors="replace"), source=str(path))
    if document.problems or not isinstance(document.data, Mapping):
        raise ConfigError(
            "the configuration of the run cannot be read",
            path=str(path),
            rule="YAML as a run writes it",
            repair="restore the file",
        )
    return EvaluatedRun(Path(folder), document.data, tuple(_notes(document.data)))


def run_defaults(run: EvaluatedRun) -> dict[str, Any]:
    """Return what the run's configuration means for an evaluation, as the lowest layer of its configuration.

    The tasks are those that the run holds out, if it holds any out. The context, the longest completion, the
    temperature and the number of samples are those of its own evaluations.
    """
    config = run.config
    training, evaluation = _section(config, "training"), _section(config, "evaluation")
    generator = {key: value for key, value in _section(config, "generator").items() if key not in _DROPPED}
    sampling = dict(_section(generator, "sampling"))
    sampling |= {"n": 1, "seed": None}
    if generator.get("max_seq_len") is None and "rollout" in config and training.get("max_seq_len"):
        generator["max_seq_len"] = training["max_seq_len"]
        if sampling.get("max_tokens") is None:
            sampling["max_tokens"] = max(1, training["max_seq_len"] // 2)
    found: dict[str, Any] = {"model": dict(_section(config, "model")), "eval": {}}
    if "temperature" in evaluation:
        sampling["temperature"] = evaluation["temperature"]
        names = {"num_samples": "num_samples", "max_prompts": "num_tasks", "solved_at": "solved_at", "reward": "reward"}
        found["eval"] = {ours: evaluation[theirs] for theirs, ours in names.items() if theirs in evaluation}
    found["generator"] = {**generator, "sampling": sampling}
    seed = _section(config, "run").get("seed", 0)
    found["run"] = {"seed": seed}
    if "prompts" in config:
        prompts = dict(_section(config, "prompts"))
        if evaluation.get("sources"):
            prompts["sources"] = [_seeded(each, seed, number) for number, each in enumerate(evaluation["sources"])]
        elif evaluation.get("fraction"):
            found["eval"]["heldout_fraction"] = evaluation["fraction"]
        found["prompts"] = prompts
    for key in ("rewards", "episode"):
        if key in config:
            found[key] = dict(_section(config, key))
    if "episode" in found:
        found["episode"]["group_reward"] = None
    return found


def load_eval(*, files: Iterable[str] = (), overrides: Iterable[str] = (), run: str | None = None) -> EvalConfig:
    """Load the configuration of an evaluation. With `run`, or `eval.run` in a file or an override, the configuration of
    that run gives the defaults."""
    files, overrides = list(files), list(overrides)
    if run is not None:
        overrides = [f"eval.run={json.dumps(run)}", *overrides]
    named = _given(files, overrides, "eval", "run")
    if not isinstance(named, str):
        return load(EvalConfig, files=files, overrides=overrides)
    defaults = run_defaults(open_run(named))
    if _given(files, overrides, "episode", "kind") is not None:  # another program scores by itself
        defaults.pop("rewards", None)
        defaults.pop("episode", None)
    elif _given(files, overrides, "rewards", "functions") is not None:
        defaults.pop("episode", None)
    return load(EvalConfig, files=files, overrides=overrides, defaults=defaults)


def _given(files: list[str], overrides: list[str], section: str, key: str) -> Any:
    """Return what files and overrides set a key to; None for nothing. What is wrong with them is reported when they are
    loaded."""
    value: Any = None
    for file in files:
        if Path(file).is_file():
            data = read_yaml(Path(file).read_text(encoding="utf-8", errors="replace"), source=file).data
            value = _section(data, section).get(key, value)
    start = f"{section}.{key}="
    for word in overrides:
        if word.startswith(start):
            value = read_yaml(word.removeprefix(start), source=word).data
    return value


def _seeded(source: Any, seed: int, number: int) -> dict[str, Any]:
    """Return a held-out source with the seed that it has in the run, where its place decides it."""
    fields = dict(source)
    if fields.get("task") is not None and fields.get("seed") is None:
        fields["seed"] = derive(seed, "evaluation", number) % 2**31
    return fields


def _notes(config: Mapping[str, Any]) -> Iterable[str]:
    evaluation = _section(config, "evaluation")
    if "prompts" in config and not (evaluation.get("sources") or evaluation.get("fraction")):
        yield "the run holds out no prompts: by default these are tasks that it trained on"
    if _section(config, "episode").get("group_reward") is not None:
        yield "episode.group_reward is left out: samples are scored one by one"


def _section(data: Any, key: str) -> Mapping[str, Any]:
    found = data.get(key) if isinstance(data, Mapping) else None
    return found if isinstance(found, Mapping) else {}
