"""`forge template check`: which conversations a model's chat template lets an agent continue token by token."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forge.envs.template_check import Continuation
    from forge.models.tokenizer import ChatTokenizer

FORMATS = ("auto", "hermes", "llama", "json")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `template check`."""
    template = subparsers.add_parser("template", help="check a model's chat template for multi-turn episodes")
    commands = template.add_subparsers(dest="template_command", metavar="check", required=True)
    check = commands.add_parser(
        "check",
        help="report which continuations of a conversation keep the sampled tokens",
        description="Try every kind of continuation that agents use. A continuation is exact if the template extends "
        "the text of the sampled tokens. Otherwise the next turn starts a new branch. No weights are loaded.",
    )
    check.add_argument("model", metavar="MODEL", help="folder with the model's tokenizer, or a run's folder")
    check.add_argument(
        "--tool-format", choices=FORMATS, default="auto", help="how tool calls are written; default: by the template"
    )
    check.add_argument(
        "--chat-template", metavar="FILE", help="a Jinja file to use instead of the model's own template"
    )
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument("--strict", action="store_true", help="exit with 1 if a continuation is not exact")
    check.set_defaults(handler=_check)


def _check(arguments: argparse.Namespace) -> int:
    from forge.cli.chat import model_folder
    from forge.envs.template_check import check_template
    from forge.envs.tool_calls import detect_format
    from forge.models.tokenizer import ChatTokenizer

    tokenizer = ChatTokenizer.load(model_folder(arguments.model), chat_template=arguments.chat_template)
    _check_has_template(tokenizer)
    tool_format = arguments.tool_format
    if tool_format == "auto":
        tool_format = detect_format(tokenizer.chat_template)
    found = check_template(tokenizer, tool_format=tool_format, end=tokenizer.end_of_turn)
    is_exact = all(each.is_exact for each in found)
    if arguments.json:
        print(json.dumps(_plain(tokenizer.name, tool_format, found), indent=2, ensure_ascii=False))
    else:
        print(f"{tokenizer.name}, tool format {tool_format}\n")
        print(_table(found))
        print(f"\n{_verdict(found)}")
    return 1 if arguments.strict and not is_exact else 0


def _check_has_template(tokenizer: ChatTokenizer) -> None:
    from forge.errors import ModelError

    if not tokenizer.has_chat_template:
        raise ModelError(
            "the tokenizer has no chat template",
            path=tokenizer.name,
            value=None,
            rule="episodes need a template that turns conversations into text",
            repair="name a Jinja file with --chat-template, or use the chat version of the model",
        )


def _status(each: Continuation) -> str:
    if each.is_exact:
        return "exact"
    return "refused" if each.prefix_break is None else f"prefix break ({each.prefix_break})"


def _table(found: Sequence[Continuation]) -> str:
    width = max(len(each.name) for each in found)
    lines = []
    for each in found:
        lines.append(f"{each.name:<{width}}  {_status(each)}")
        if each.detail:
            lines.append(f"{'':<{width}}  {each.detail}")
    return "\n".join(lines)


def _verdict(found: Sequence[Continuation]) -> str:
    num_exact = sum(each.is_exact for each in found)
    if num_exact == len(found):
        return f"All {len(found)} continuations are exact."
    num_refused = sum(not each.is_exact and each.prefix_break is None for each in found)
    num_broken = len(found) - num_exact - num_refused
    parts = [f"{num_exact} of {len(found)} continuations are exact"]
    if num_broken:
        starts = "starts" if num_broken == 1 else "start"
        parts.append(f"{num_broken} {starts} a new branch, whose history is computed again")
    if num_refused:
        parts.append(f"{num_refused} {'is' if num_refused == 1 else 'are'} refused by the template")
    return "; ".join(parts) + "."


def _plain(name: str, tool_format: str, found: Sequence[Continuation]) -> dict[str, Any]:
    return {
        "template": name,
        "tool_format": tool_format,
        "is_exact": all(each.is_exact for each in found),
        "continuations": [
            {
                "name": each.name,
                "is_exact": each.is_exact,
                "status": "exact" if each.is_exact else "refused" if each.prefix_break is None else "prefix_break",
                "prefix_break": each.prefix_break,
                "detail": each.detail,
            }
            for each in found
        ],
    }
