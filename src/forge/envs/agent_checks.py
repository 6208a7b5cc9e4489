"""What programs get wrong when they use an agent, said where they do it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from forge.errors import OptionError, RewardError
from forge.types import Turn

_EXAMPLE: Final = '[{"role": "user", "content": "Hi"}]'


def check_messages(messages: object, path: str) -> None:
    """Refuse what is not a list of messages."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    wrong: object = messages
    if is_list:
        bad = (each for each in messages if not (isinstance(each, Mapping) and isinstance(each.get("role"), str)))  # type: ignore[attr-defined]
        wrong = next(bad, None)
        if wrong is None:
            return
    raise OptionError(
        "this is not a list of messages",
        path=path,
        value=wrong,
        rule="a list of messages, each with the key `role`",
        repair=f"write {_EXAMPLE}",
    )


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse sampling options of one turn that are not the program's to choose."""
    for name, repair in (("n", "fork the agent for several answers"), ("seed", "leave it out")):
        if name in options:
            raise OptionError(
                f"`{name}` cannot be chosen for a turn",
                path=f"agent.generate({name}=)",
                value=options[name],
                rule="a turn is one answer, and its seed derives from the run, the group, the member and the branch",
                repair=repair,
            )
    wanted = options.get("max_tokens")
    if wanted is not None and not (isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 1):
        raise OptionError(
            "max_tokens is not a positive whole number",
            path="agent.generate(max_tokens=)",
            value=wanted,
            rule="a whole number of at least 1",
            repair="leave it out for the run's own",
        )


def check_temperature(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Refuse a temperature that a trainer would not compute with."""
    if not has_temperature(options, sampling):
        raise OptionError(
            "a turn that is trained on is sampled at the run's temperature",
            path="agent.generate(temperature=)",
            value=options["temperature"],
            rule=f"{sampling['temperature']}, the run's: the trainer computes logprobs at that temperature",
            repair="leave it out, or leave the turn out of training: agent.generate(…, temperature=…, train=False)",
        )


def has_temperature(options: Mapping[str, Any], sampling: Mapping[str, Any]) -> bool:
    """Return whether a turn with these options is sampled at the run's temperature."""
    own = sampling.get("temperature")
    return own is None or bool(options.get("temperature", own) == own)


def check_credit(name: object, turn: object, turns: Sequence[Turn], *, agent: str) -> None:
    """Refuse a reward without a name, or for what is not a turn of this agent in this episode."""
    if not isinstance(name, str) or not name:
        raise OptionError(
            "a reward has no name",
            path="agent.add_reward(name=)",
            value=name,
            rule="text that is not empty: it names the metric",
            repair='write agent.add_reward(value, name="style")',
        )
    if turn is None:
        return
    is_own = isinstance(turn, Turn) and turn.index < len(turns) and turns[turn.index].seed == turn.seed
    if not is_own:
        raise OptionError(
            "this is not a turn of the episode",
            path="agent.add_reward(turn=)",
            value=turn if not isinstance(turn, Turn) else f"turn {turn.index}",
            rule="a turn that `generate` or `run_tools` of this episode returned",
            repair="pass the turn itself",
        )
    if turns[turn.index].agent != agent:  # type: ignore[attr-defined]
        raise OptionError(
            "this is another agent's turn",
            path=f"{agent}.add_reward(turn=)",
            value=f"turn {turn.index} of {turns[turn.index].agent}",  # type: ignore[attr-defined]
            rule=f"a turn of {agent}",
            repair="give the reward to the agent whose turn it is, or leave `turn` out",
        )


def check_reward(value: object, name: str) -> float:
    """Return a reward as a number; `RewardError` if it is not a finite one."""
    is_number = isinstance(value, int | float) or (hasattr(value, "__float__") and not isinstance(value, str))
    try:
        number = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise RewardError(
            f"the reward {name!r} is not a finite number",
            path=f"add_reward(name={name!r})",
            value=value,
            rule="a finite number",
            repair="return a number for every answer; raise Fault where there is none because something else failed",
        )
    return number
