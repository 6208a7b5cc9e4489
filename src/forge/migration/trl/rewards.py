"""The rewards that TRL's script and trainer name."""

from __future__ import annotations

from typing import Any, Final

from forge.migration.models import is_hub_name, names_of, own_reward
from forge.migration.records import Computed, Converted, PeerConfig
from forge.migration.rules import joint

_FORMAT: Final = r"^<think>(?!.*<think>)(.*?)</think>.*$"
_OVERLONG: Final = {"rewards.overlong": {"max_tokens": 1280, "buffer": 256, "penalty": 1.0}}
"""What `trl grpo` gives get_soft_overlong_punishment."""

_BUILT_IN: Final[dict[str, tuple[dict[str, Any], str]]] = {
    "accuracy_reward": ({"kind": "math"}, "`math` compares with `answer`, which is the column `solution`"),
    "reasoning_accuracy_reward": (
        {"kind": "math"},
        "`math` compares with `answer`, which is the column `solution`, and ignores what stands before </think>",
    ),
    "think_format_reward": (
        {"kind": "regex", "name": "think_format", "args": {"pattern": f"(?s){_FORMAT}"}},
        "a regular expression of the same form",
    ),
}
_HOW: Final = "write it as `def reward(prompt: Task, completion: Completion) -> float` in the module that is named"


def _rewards(config: PeerConfig) -> Converted:
    functions: list[dict[str, Any]] = []
    values: dict[str, Any] = {}
    notes: list[str] = []
    missing: list[str] = []
    models = [config["reward_model_name_or_path"]] if config["reward_model_name_or_path"] else []
    weights = names_of(config["reward_weights"])
    for index, name in enumerate([*models, *names_of(config["reward_funcs"])]):
        weight = weights[index] if index < len(weights) else 1.0
        text = str(name)
        if text == "get_soft_overlong_punishment":
            values |= _OVERLONG
            notes.append("the punishment is rewards.overlong, subtracted after the other rewards")
        elif text in _BUILT_IN:
            found, note = _BUILT_IN[text]
            functions.append(found | ({} if weight == 1.0 else {"weight": float(weight)}))
            notes.append(note)
        elif name in models or (isinstance(name, str) and is_hub_name(text)):
            functions.append({"kind": "reward_model"} | ({} if weight == 1.0 else {"weight": float(weight)}))
            values["rewards.reward_model"] = {"path": f"models/{text.rpartition('/')[2]}"}
            notes.append(f"`forge download {text}` fetches the reward model")
        else:
            missing.append(text)
            functions.append({"kind": own_reward(text)} | ({} if weight == 1.0 else {"weight": float(weight)}))
    if functions:
        values["rewards.functions"] = functions
    todo = {}
    if missing:
        todo["rewards.functions"] = f"{', '.join(missing)}: {_HOW}"
    elif not functions:
        how = "your own is module:function, a function of a prompt and a completion"
        todo["rewards.functions"] = f"at least one reward: `forge rewards` lists them; {how}"
    return Converted(values, verdict="differs" if notes else None, note="; ".join(dict.fromkeys(notes)), todo=todo)


def reward_names(value: Any) -> list[Any]:
    """Return the names of reward functions: of functions of a script their text."""
    return [each.text if isinstance(each, Computed) else each for each in names_of(value)]


REWARD_RULE = joint(
    "reward_funcs reward_model_name_or_path reward_weights",
    "rewards.functions rewards.overlong rewards.reward_model",
    _rewards,
    verdict="differs",
)
