"""`forge eval`: evaluate a model, a run's checkpoint or an endpoint on any tasks, and look at what came out."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from forge.cli.config import AnyOrderParser
from forge.errors import ConfigError
from forge.log_levels import add_log_flags
from forge.recipes import find_config

if TYPE_CHECKING:
    from forge.config import EvalConfig
    from forge.loops.evals.running import EvalProgress

_KEYS = {
    "step": "eval.step",
    "num_samples": "eval.num_samples",
    "num_tasks": "eval.num_tasks",
    "max_concurrent": "eval.max_concurrent",
    "seed": "run.seed",
    "temperature": "generator.sampling.temperature",
    "max_tokens": "generator.sampling.max_tokens",
    "num_replicas": "generator.num_replicas",
    "engine": "generator.engine",
}
_EPILOG = """\
commands:
  forge eval show EVAL_DIR      print the figures and samples of an evaluation
  forge eval compare A B …      compare evaluations of the same tasks, task by task

examples:
  forge eval --model models/qwen3-0.6b --tasks test.jsonl --reward number --num-samples 4
  forge eval --run runs/grpo --step 100 --output evals/step-100
  forge eval --episode my_module:solve --tasks tasks.jsonl --endpoint http://127.0.0.1:8000/v1 --model my-model
"""


class _EvalParser(AnyOrderParser):
    """Hands `forge eval show` and `forge eval compare` to parsers of their own."""

    commands: dict[str, argparse.ArgumentParser]

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = list(sys.argv[1:] if args is None else args)
        if words and words[0] in self.commands:
            return self.commands[words[0]].parse_known_args(words[1:], namespace)
        return super().parse_known_args(words, namespace)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `eval`, `eval show` and `eval compare`."""
    from forge.cli.eval_show import compare_parser, show_parser

    parser = subparsers.add_parser(
        "eval",
        help="evaluate a model, a run's checkpoint or an endpoint: pass@k and rewards with confidence intervals",
        description="Run an episode, or prompts with rewards, over a dataset. Samples are recorded as they come: after "
        "a kill, the same command continues. Exit code 1 if tasks are missing because of faults.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    assert isinstance(parser, argparse.ArgumentParser)
    parser.__class__ = _EvalParser  # add_parser() makes its own class
    parser.commands = {"show": show_parser(), "compare": compare_parser()}  # type: ignore[attr-defined]
    parser.add_argument(
        "words", metavar="NAME=VALUE|OVERRIDE", nargs="*", help="arguments of the program, and a.b=c for any other key"
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        type=find_config,
        action="append",
        default=[],
        help="a YAML file or a recipe; later ones win",
    )
    target = parser.add_argument_group("what is evaluated")
    target.add_argument(
        "--model", metavar="NAME", help="the model's folder, or the preset tiny; with --endpoint, its name there"
    )
    target.add_argument(
        "--run", metavar="RUN_DIR", help="a run's folder: its checkpoint, with its own tasks and rewards"
    )
    target.add_argument("--step", metavar="N", help="the step of the run's checkpoint; default: the newest")
    target.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint")
    target.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the endpoint's key; default: OPENAI_API_KEY"
    )
    tasks = parser.add_argument_group("tasks and scores")
    tasks.add_argument(
        "--tasks",
        metavar="SOURCE",
        action="append",
        default=[],
        help="a file of tasks, a pattern or a folder, or the name of a built-in task such as arithmetic; repeatable",
    )
    tasks.add_argument("--num-tasks", metavar="N", help="at most this many tasks; default: all")
    tasks.add_argument("--episode", metavar="MODULE:ATTRIBUTE", help="the episode's program")
    tasks.add_argument(
        "--reward", metavar="KIND", action="append", default=[], help="a reward, in place of a program; repeatable"
    )
    samples = parser.add_argument_group("samples")
    samples.add_argument("-n", "--num-samples", metavar="N", help="samples per task; default: 1")
    samples.add_argument("--temperature", metavar="X", help="0 for greedy decoding; default: 1")
    samples.add_argument("--max-tokens", metavar="N", help="the longest answer")
    samples.add_argument("--seed", metavar="N", help="what all seeds derive from; default: 0")
    samples.add_argument("--max-concurrent", metavar="N", help="samples in progress at once")
    samples.add_argument("--num-replicas", metavar="N", help="generators that share the requests; default: 1")
    samples.add_argument("--engine", metavar="ENGINE", help="native (the default), vllm, or module:attribute")
    output = parser.add_argument_group("output")
    output.add_argument("--output", metavar="EVAL_DIR", help="folder of the evaluation; default: runs/eval")
    output.add_argument("--overwrite", action="store_true", help="start over where the folder has other samples")
    output.add_argument("--allow-missing", action="store_true", help="exit with 0 even if tasks are missing")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    add_log_flags(parser)
    parser.set_defaults(handler=_eval)


def configure(arguments: argparse.Namespace) -> EvalConfig:
    """Return the configuration that the command line asks for. Overrides win over options, and options over files."""
    from forge.cli.chat import as_yaml, model_folder, parse_number
    from forge.config import add_module_folders, preset_names
    from forge.loops.evals.run_defaults import load_eval

    _check_target(arguments)
    add_module_folders(arguments.config)
    options: dict[str, Any] = {key: parse_number(getattr(arguments, name)) for name, key in _KEYS.items()}
    if arguments.endpoint is not None:
        options |= {"eval.endpoint.url": arguments.endpoint, "eval.endpoint.model": arguments.model}
        options["eval.endpoint.api_key_env"] = arguments.api_key_env
    elif arguments.model in preset_names() and not Path(arguments.model).exists():
        options["model.preset"] = arguments.model
    elif arguments.model is not None:
        options["model.path"] = model_folder(arguments.model)
    if arguments.output is not None:
        place = Path(arguments.output)
        options |= {"run.name": place.name, "run.output_dir": str(place.parent)}
    options |= {"episode.kind": arguments.episode, "eval.allow_missing": arguments.allow_missing or None}
    given = [
        f"{key}={'true' if value is True else as_yaml(value)}" for key, value in options.items() if value is not None
    ]
    if arguments.tasks:
        given.append(f"prompts.sources={json.dumps([_source(text) for text in arguments.tasks])}")
    if arguments.reward:
        given.append(f"rewards.functions={json.dumps([{'kind': kind} for kind in arguments.reward])}")
    return load_eval(files=arguments.config, overrides=[*given, *_overrides(arguments.words)], run=arguments.run)


def _overrides(words: Sequence[str]) -> list[str]:
    """Return words as overrides. `NAME=VALUE` with a plain name is an argument of the program."""
    found = []
    for word in words:
        name, equals, _ = word.partition("=")
        if not equals and not word.startswith("~"):
            raise ConfigError(
                "this is neither a command nor an argument",
                path="NAME=VALUE",
                value=word,
                rule="show, compare, NAME=VALUE for the program, or a.b=c for a key of the configuration",
                repair="name what is evaluated with --model, --run or --endpoint, and a program with --episode",
            )
        found.append(f"episode.args.{word}" if name.isidentifier() else word)
    return found


def _source(text: str) -> dict[str, str]:
    """Return the source that an option names: a file where there is one, or else a built-in task."""
    from forge.registry import TASKS

    is_file = Path(text).exists() or TASKS.problem(text) is not None
    return {"path": text} if is_file else {"task": text}


def _check_target(arguments: argparse.Namespace) -> None:
    if arguments.run is not None and (arguments.endpoint is not None or arguments.model is not None):
        raise ConfigError(
            "one model is evaluated at a time",
            path="--run",
            value=arguments.run,
            rule="not with --model or --endpoint",
            repair="leave one of them out",
        )
    if arguments.api_key_env is not None and arguments.endpoint is None:
        raise ConfigError(
            "the variable of a key was given without an endpoint",
            path="--api-key-env",
            value=arguments.api_key_env,
            rule="only with --endpoint",
            repair="give --endpoint URL, or leave it out",
        )


def _eval(arguments: argparse.Namespace) -> int:
    import asyncio

    from forge.cli.eval_show import summary_lines
    from forge.errors import INPUT_ERRORS, EvalError, ForgeError
    from forge.loops.evals.running import evaluate
    from forge.observe.logs import start_logging
    from forge.observe.monitor import monitored

    start_logging("error")
    config = configure(arguments)
    folder = config.run.output_dir / config.run.name
    bar = _Bar()
    try:
        with monitored() as monitor:
            bar.on_begin = monitor.end_start
            result = asyncio.run(evaluate(config, overwrite=arguments.overwrite, on_progress=bar.show))
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"forge eval: stopped; the same command continues {folder}", file=sys.stderr)
        return 130
    except INPUT_ERRORS:
        raise
    except ForgeError as error:
        print(f"forge eval: {error}", file=sys.stderr)
        return 2 if isinstance(error, EvalError) and error.path == str(folder) else 1
    finally:
        bar.close()
    if arguments.json:
        print(json.dumps({**result.plain(), "folder": str(result.folder)}, indent=2, ensure_ascii=False, default=str))
    else:
        print("\n".join(summary_lines(result.plain(), folder=result.folder)))
    return result.exit_code


class _Bar:
    """A progress bar on standard error, where that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self.on_begin: Callable[[], object] = lambda: None
        """Called before it is drawn."""

    def show(self, progress: EvalProgress) -> None:
        """Show how far the evaluation is."""
        from tqdm import tqdm

        if self._bar is None:
            self.on_begin()
            self._bar = tqdm(
                total=progress.num_total, initial=progress.num_done, unit="sample", file=sys.stderr, disable=None
            )
        solved = "" if progress.solved != progress.solved else f"solved {progress.solved:.1%}"
        failed = f", failed {progress.num_failed}" if progress.num_failed else ""
        self._bar.set_postfix_str(solved + failed, refresh=False)
        self._bar.update(progress.num_done - self._bar.n)

    def close(self) -> None:
        """Leave the bar as it is, and go to the next line."""
        if self._bar is not None:
            self._bar.close()
