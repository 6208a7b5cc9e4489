"""`forge plan CONFIG [overrides]`: the memory of a run, worked out without running it."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from forge.cli.config import AnyOrderParser
from forge.errors import ConfigError

if TYPE_CHECKING:
    from forge.config import ForgeConfig
    from forge.memory import Card

_KINDS = ("sft", "policy", "grpo", "dpo", "reward_model", "distill")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `plan`."""
    parser = subparsers.add_parser(
        "plan",
        help="show how much memory a run needs, and what would fit",
        description="Work out how much memory each GPU and the host will need: weights, gradients, optimizer states, "
        "activations, published weights, the cache for keys and values. Nothing is started, and no GPU is needed. A "
        "run that does not fit ends with exit code 2 and with changes that do, to be pasted behind the command.",
        epilog="example: forge plan grpo/qwen3_1_7b --gpu-memory 48GB --gpus 1 training.max_seq_len=4096",
    )
    parser.__class__ = AnyOrderParser  # overrides may stand between options
    parser.add_argument(
        "words",
        metavar="CONFIG|OVERRIDE",
        nargs="+",
        help="YAML files or recipes, and a.b=c or ~a.b for any key; overrides win",
    )
    parser.add_argument(
        "--gpu-memory", metavar="SIZE", help="memory of one GPU, such as 80GB; default: that of this machine's"
    )
    parser.add_argument(
        "--gpus", metavar="N", type=int, help="how many GPUs there are; default: this machine's, or what the run needs"
    )
    parser.add_argument("--json", action="store_true", help="print JSON, with every moment and every part in bytes")
    parser.add_argument("--kind", choices=_KINDS, help="kind of configuration; default: found from its sections")
    parser.set_defaults(handler=_plan)


def _plan(arguments: argparse.Namespace) -> int:
    from forge.config import split_words
    from forge.recipes import read_command
    from forge.recipes.stand_ins import stand_ins

    command = read_command(*split_words(arguments.words))
    with stand_ins(command.settings) as found:
        return _plan_config(_load(command.files, [*command.words, *found.overrides], kind=arguments.kind), arguments)


def _plan_config(config: ForgeConfig, arguments: argparse.Namespace) -> int:
    from forge.memory import as_json, as_table, find_limits, plan_memory, propose, resolve_run
    from forge.memory.card import host_memory
    from forge.memory.checking import refusal

    card, is_own = _card(arguments)
    run = resolve_run(config, card=card)
    if run.uses_gpus and card is None:
        raise _which_gpu()
    host_bytes = host_memory() if is_own or not run.uses_gpus else None
    plan = plan_memory(run, card=card, host_bytes=host_bytes)
    limits = find_limits(run, card=card, host_bytes=host_bytes)
    changes = () if plan.fits else propose(config, card=card, host_bytes=host_bytes)
    if arguments.json:
        print(json.dumps(as_json(plan, limits=limits, changes=changes), indent=2))
    else:
        print(as_table(plan, limits=limits, changes=changes), end="")
    if not plan.fits:
        error = refusal(plan, changes)
        error.repair = "one of the changes listed above" if changes else "use a smaller model, or more or larger GPUs"
        raise error
    return 0


def _card(arguments: argparse.Namespace) -> tuple[Card | None, bool]:
    """The GPUs to plan for, and whether they are this machine's."""
    from forge.memory import Card, find_card, parse_size

    if arguments.gpus is not None and arguments.gpus < 1:
        raise ConfigError(
            "there is nothing to plan for",
            path="--gpus",
            value=arguments.gpus,
            rule="at least 1",
            repair="leave it out for as many as the run needs",
        )
    if arguments.gpu_memory is not None:
        return Card(parse_size(arguments.gpu_memory), arguments.gpus), False
    own = find_card()
    if arguments.gpus is None:
        return own, own is not None
    if own is None:
        raise _which_gpu()
    return Card(own.num_bytes, arguments.gpus, own.name), arguments.gpus == own.num_gpus


def _which_gpu() -> ConfigError:
    return ConfigError(
        "which GPU should this be planned for? This machine has none",
        path="--gpu-memory",
        value=None,
        rule="the memory of one GPU, where the run uses GPUs and this machine has none",
        repair="add --gpu-memory 80GB, and --gpus N if there are only so many",
    )


def _load(files: Sequence[str], overrides: Sequence[str], *, kind: str | None) -> ForgeConfig:
    from forge.config import load
    from forge.config.command_line import SCHEMAS, detect_kind

    return load(SCHEMAS[kind or detect_kind(files, overrides).kind], files=files, overrides=overrides)
