"""Write docs/reference/config.md from the schema. Run it after every change of the schema."""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from forge.config import (
    DistillConfig,
    EvalConfig,
    ForgeConfig,
    GRPOConfig,
    PolicyConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SFTConfig,
)
from forge.config.fields import elements_of, sections_of

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "config.md"

HEADER = """\
# Configuration reference

Every key of `forge.config.ForgeConfig`, with its type, default and limits, and then the sections that an application
adds. This page is made from the schema by `scripts/config_reference.py`.
"""

SFT_HEADER = """\
# Supervised fine-tuning

What `forge.config.SFTConfig` adds for `apps/sft`; see [the guide](../guides/sft.md).
"""

PREFERENCE_HEADER = """\
# Preference optimisation

What `forge.config.PreferenceConfig` adds for `apps/dpo`; see [the guide](../guides/preferences.md). The sections
`distributed`, `checkpointing`, `metrics` and `adapter` are those of supervised fine-tuning, and so is `training`, where
`training.share_prefixes` is true unless you set it: the two answers of a pair share their prompt.
"""

REWARD_HEADER = """\
# Training of reward models

What `forge.config.RewardTrainingConfig` adds for `apps/reward_model`; see [the guide](../guides/reward_models.md). The
other sections are those of supervised fine-tuning. `model.head` is `scalar`.
"""

POLICY_HEADER = """\
# Generation

What `forge.config.PolicyConfig` adds for `forge chat`, `forge serve` and `apps/vllm`; see
[the guide](../guides/generators.md). A `forge.config.GeneratorConfig` has the keys of `generator`, and `model`.
"""

GRPO_HEADER = """\
# Reinforcement learning

What `forge.config.GRPOConfig` adds for `apps/grpo`; see [the guide](../guides/grpo.md). The sections `training`,
`distributed`, `checkpointing` and `metrics` are those of supervised fine-tuning, and `generator` is that of generation.
`training.batch_size` and `training.gradient_accumulation_steps` have no meaning here: a step learns from
`rollout.batch_groups` groups.
"""

DISTILL_HEADER = """\
# Distillation

What `forge.config.DistillConfig` adds for `forge distill` and `apps/distill`; see
[the guide](../guides/distillation.md). The other sections are those of supervised fine-tuning, and `teacher` is that of
reinforcement learning.
"""

EVAL_HEADER = """\
# Evaluation

What `forge.config.EvalConfig` adds for `forge eval`; see [the guide](../guides/evaluation.md). The sections `prompts`,
`rewards` and `episode` are those of reinforcement learning, and `generator` is that of generation.
"""


def make_page() -> str:
    """The whole page."""
    pages = [HEADER, *_sections([("", ForgeConfig)]), SFT_HEADER, *_sections(_added(SFTConfig))]
    own = [(path, section) for path, section in _added(PreferenceConfig) if section not in _of(SFTConfig)]
    pages += [PREFERENCE_HEADER, *_sections([each for each in own if each[0] != "training"])]
    own = [(path, section) for path, section in _added(RewardTrainingConfig) if section not in _of(SFTConfig)]
    pages += [REWARD_HEADER, *_sections(own)]
    pages += [POLICY_HEADER, *_keys(PolicyConfig), *_sections(_added(PolicyConfig))]
    elsewhere = _of(SFTConfig) | _of(PolicyConfig)
    own = [(path, section) for path, section in _added(GRPOConfig) if section not in elsewhere]
    pages += [GRPO_HEADER, *_keys(GRPOConfig), *_sections(own)]
    elsewhere |= _of(GRPOConfig)
    pages += [DISTILL_HEADER, *_sections([each for each in _added(DistillConfig) if each[1] not in elsewhere])]
    pages += [EVAL_HEADER, *_sections([each for each in _added(EvalConfig) if each[1] not in elsewhere])]
    return "\n".join(pages).rstrip() + "\n"


def _of(schema: type[ForgeConfig]) -> set[type[BaseModel]]:
    return {section for _, section in _added(schema)}


def _added(schema: type[ForgeConfig]) -> list[tuple[str, type[BaseModel]]]:
    """The sections that an application has besides those of every program."""
    return [
        (name, section)
        for name, field in schema.model_fields.items()
        if name not in ForgeConfig.model_fields
        for section in sections_of(field.annotation)
    ]


def _keys(schema: type[ForgeConfig]) -> Iterator[str]:
    """The keys that an application adds at the top level and that are no sections."""
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in schema.model_fields.items():
        if name not in ForgeConfig.model_fields and not list(sections_of(field.annotation)):
            yield _row(name, field)
    yield ""


def _sections(waiting: list[tuple[str, type[BaseModel]]]) -> Iterator[str]:
    while waiting:
        path, section = waiting.pop(0)
        yield f"## {f'`{path}`' if path else 'The top level'}\n"
        yield f"{(section.__doc__ or '').strip().splitlines()[0]}\n"
        yield "| key | type | default | meaning |\n|---|---|---|---|"
        below = []
        for name, field in section.model_fields.items():
            yield _row(name, field)
            dotted = f"{path}.{name}".lstrip(".")
            below += [(dotted, found) for found in sections_of(field.annotation)]
            for placeholder, element in elements_of(field.annotation):
                below += [(f"{dotted}.{placeholder}", found) for found in sections_of(element)]
        yield ""
        waiting = below + waiting


def _row(name: str, field: FieldInfo) -> str:
    limits = _limits(field)
    meaning = f"{field.description or ''} {f'Limits: {limits}.' if limits else ''}".strip()
    return f"| `{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |".replace("\n", " ")


def _limits(field: FieldInfo) -> str:
    signs = {Ge: ("≥", "ge"), Gt: (">", "gt"), Le: ("≤", "le"), Lt: ("<", "lt")}
    words = []
    for limit in field.metadata:
        if type(limit) in signs:
            sign, attribute = signs[type(limit)]
            words.append(f"{sign} {getattr(limit, attribute)}")
        elif isinstance(limit, MinLen):
            words.append("not empty")
    return ", ".join(words)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is PydanticUndefined or isinstance(value, BaseModel):
        return "see below"
    if isinstance(value, bool) or value is None:
        return f"`{str(value).lower().replace('none', 'null')}`"
    if isinstance(value, dict | tuple):
        return "empty" if not value else f"`{value}`"
    return f"`{value}`"


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if annotation is type(None):
        return "null"
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Union or origin is types.UnionType:
        return " or ".join(_type(argument) for argument in arguments)
    if origin is Literal:
        return " or ".join(f"`{choice}`" for choice in arguments)
    if origin is tuple:
        return f"list of {_type(arguments[0])}"
    if origin is not None:
        return f"mapping of {_type(arguments[0])} to {_type(arguments[1])}"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    names = {Any: "anything", int: "integer", float: "number", bool: "true or false", str: "text", Path: "path"}
    return names[annotation]


if __name__ == "__main__":
    PAGE.parent.mkdir(parents=True, exist_ok=True)
    PAGE.write_text(make_page(), encoding="utf-8")
    print(f"wrote {PAGE.name}")
