"""One log for a run, which passes every metric on to several sinks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Self

from forge.errors import ConfigError, DataError
from forge.observe.secrets import without_secrets
from forge.observe.sink import LinkSink, Sink, Table, TableSink, Value
from forge.registry import SINKS, call

if TYPE_CHECKING:
    from forge.config import ForgeConfig, MetricsConfig

_log = logging.getLogger("forge.observe")
_OFFERED: Final = ("folder", "project", "run_name", "config", "tags", "resume_step", "total_steps", "num_epochs")
"""What a sink may ask for by the names of its arguments."""
_NEEDING_PACKAGES: Final = ("mlflow", "trackio", "wandb")


class MetricsLog:
    """Passes metrics on to sinks, by name. It is a sink itself, and closes them when a `with` block ends.

    A sink that raises does not end the run: it is reported once, by a warning of the logger `forge.observe` that
    names the sink, the step and the error; it is closed, left out from then on, and kept in `failures`. The other sinks
    and the caller continue. A mistake of the *caller* is raised: a negative step, a value that is not a number or text.
    """

    def __init__(self, sinks: Mapping[str, Sink]) -> None:
        self._sinks = dict(sinks)
        self._failures: dict[str, Exception] = {}
        self._closed = False

    @property
    def sinks(self) -> Mapping[str, Sink]:
        """The sinks that still take metrics."""
        return MappingProxyType(self._sinks)

    @property
    def failures(self) -> Mapping[str, Exception]:
        """The sinks that were left out, and what each of them raised."""
        return MappingProxyType(self._failures)

    def write(self, step: int, values: Mapping[str, Value]) -> None:
        if self._closed:
            raise ValueError("the metrics log is closed: metrics can no longer be written to it")
        if not isinstance(step, int) or step < 0:
            raise DataError(
                "the step is not a valid number",
                path="step",
                value=step,
                rule="a whole number, 0 or more",
                repair="count optimizer steps from 0 on",
            )
        checked = {name: _plain(name, value) for name, value in values.items()}
        for name, sink in list(self._sinks.items()):
            try:
                sink.write(step, checked)
            except Exception as error:  # noqa: BLE001 - reported, and kept in `failures`
                self._leave_out(name, error, when=f"at step {step}")

    @property
    def takes_tables(self) -> bool:
        """Whether there is a sink that keeps tables."""
        return any(isinstance(sink, TableSink) for sink in self._sinks.values())

    def write_table(self, step: int, name: str, table: Table) -> None:
        """Pass a table on to the sinks that take tables."""
        for label, sink in list(self._sinks.items()):
            if isinstance(sink, TableSink):
                try:
                    sink.write_table(step, name, table)
                except Exception as error:  # noqa: BLE001 - reported, and kept in `failures`
                    self._leave_out(label, error, when=f"at step {step}")

    def link(self, name: str, path: Path) -> None:
        """Let trackers keep a file of the run, or where it is."""
        for label, sink in list(self._sinks.items()):
            if isinstance(sink, LinkSink):
                try:
                    sink.link(name, path)
                except Exception as error:  # noqa: BLE001 - reported, and kept in `failures`
                    self._leave_out(label, error, when=f"when it was given {path}")

    def close(self) -> None:
        self._closed = True
        for name, sink in list(self._sinks.items()):
            try:
                sink.close()
            except Exception as error:  # noqa: BLE001 - reported, and kept in `failures`
                self._report(name, error, when="when it was closed")
        self._sinks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _leave_out(self, name: str, error: Exception, *, when: str) -> None:
        sink = self._sinks.pop(name)
        self._report(name, error, when=when)
        try:
            sink.close()
        except Exception as second:  # noqa: BLE001 - the first error was reported; this one follows from it
            _log.debug("the sink %r could not be closed either: %s", name, second)

    def _report(self, name: str, error: Exception, *, when: str) -> None:
        self._failures[name] = error
        text = "the metrics sink %r failed %s; it receives no more metrics; the run continues: %s: %s"
        _log.warning(text, name, when, type(error).__name__, error)


def _plain(name: str, value: object) -> Value:
    """Return the value as Python's own. Scalars of numpy and tensors with one element are taken as well."""
    cause = None
    if not isinstance(value, float | int | str) and hasattr(value, "item"):
        try:
            value = value.item()
        except (RuntimeError, ValueError, TypeError) as error:
            cause = error
    if isinstance(value, float | int | str):
        return value
    raise DataError(
        "a metric is neither a number nor text",
        path=name,
        value=value,
        rule="each value is a float, an int or a str",
        repair="reduce it to one number first, such as by .mean().item()",
    ) from cause


def flat_values(data: Mapping[str, Any], *, prefix: str = "") -> dict[str, Value]:
    """Return nested data as dotted keys with plain values, as trackers show a configuration."""
    found: dict[str, Value] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            found |= flat_values(value, prefix=f"{key}.")
        elif isinstance(value, bool | float | int | str):
            found[key] = value
        else:
            found[key] = "null" if value is None else json.dumps(value, ensure_ascii=False, default=str)
    return found


def sink_errors(config: MetricsConfig) -> Iterator[ConfigError]:
    """Yield what is wrong with the sinks of a configuration before they are opened."""
    from forge.config import InvalidConfig
    from forge.config.problems import argument_problems

    for index, section in enumerate(config.sinks):
        path = f"metrics.sinks[{index}]"
        try:
            factory = SINKS.find(section.kind, path=f"{path}.kind")
        except ConfigError as error:
            yield error
            continue
        offered = (*_OFFERED, "path")
        problems = argument_problems(factory, section.args, path=f"{path}.args", what="the sink", offered=offered)
        if problems:
            yield InvalidConfig(problems)
    for kind in dict.fromkeys(section.kind for section in config.enabled_sinks):
        if kind in _NEEDING_PACKAGES:
            try:
                import_module(f"forge.observe.{kind}").check_installed()
            except ConfigError as error:
                yield error


def make_sinks(
    config: MetricsConfig,
    *,
    folder: str | os.PathLike[str],
    run: ForgeConfig | None = None,
    resume_step: int | None = None,
    total_steps: int | None = None,
    num_epochs: int | None = None,
) -> MetricsLog:
    """Open the sinks that a configuration asks for; they write metrics.jsonl, tensorboard/ and wandb/ into `folder`.

    `run` is the whole configuration, which trackers show without its secrets, with its name and tags. `resume_step` is
    the step of the checkpoint that the run resumes from, None for a new run. A sink is called with its arguments, and
    with those that its signature names of `folder`, `project`, `run_name`, `config`, `tags`, `resume_step`,
    `total_steps` and `num_epochs`. One that cannot be opened is an error here, before any work is done: the user asked
    for it.
    """
    place = Path(folder)
    described = (
        () if run is None else (run.run.name, flat_values(without_secrets(run.model_dump(mode="json"))), run.run.tags)
    )
    name, values, tags = described or ("run", {}, ())
    given = (place, config.project, name, values, tags, resume_step, total_steps, num_epochs)
    offered: dict[str, object] = dict(zip(_OFFERED, given, strict=True))
    built_in: dict[str, dict[str, object]] = {
        "jsonl": {"path": place / "metrics.jsonl"},
        "tensorboard": {"folder": place / "tensorboard"},
    }
    sinks: dict[str, Sink] = {}
    try:
        for section in config.enabled_sinks:
            factory = SINKS.find(section.kind, path="metrics.sinks")
            sinks[section.label] = call(factory, args=section.args, offered=offered | built_in.get(section.kind, {}))
    except OSError as error:
        MetricsLog(sinks).close()
        raise ConfigError(
            f"the metrics cannot be written: {error.strerror or error}",
            path="run.output_dir",
            value=str(place),
            rule="a folder in which this run may create files",
            repair="choose another run.output_dir",
        ) from None
    except BaseException:
        MetricsLog(sinks).close()
        raise
    # Last, so that a bar is drawn only when everything else is open.
    from forge.observe.console import ConsoleSink
    from forge.observe.notebook import NotebookSink, is_notebook

    if is_notebook() and config.progress is not False:
        sinks["console"] = NotebookSink(name=name, total_steps=total_steps, resume_step=resume_step)
        return MetricsLog(sinks)
    sinks["console"] = ConsoleSink(
        log_interval=config.log_interval,
        style=config.console,
        num_epochs=num_epochs,
        total_steps=total_steps,
        resume_step=resume_step,
        progress=config.progress,
    )
    return MetricsLog(sinks)
