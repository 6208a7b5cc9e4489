"""`forge algorithms`: list the algorithms, or show what one computes and which keys it sets."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `algorithms`."""
    parser = subparsers.add_parser("algorithms", help="list the algorithms, or show one: formula, keys, reference")
    parser.add_argument("name", nargs="?", metavar="NAME", help="an algorithm of the list")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")
    parser.set_defaults(handler=_run)


def _run(arguments: argparse.Namespace) -> int:
    from forge.config.algorithm_table import ALGORITHMS

    names = [_known(arguments.name)] if arguments.name is not None else list(ALGORITHMS)
    if arguments.json:
        found = {name: _fields(name) for name in names}
        print(json.dumps(found, indent=1, ensure_ascii=False))
    elif arguments.name is None:
        width = max(len(name) for name in names)
        for name in names:
            facts = ALGORITHMS[name]
            print(f"{name:{width}}  {facts.title}; {facts.reference}")
        print("`forge algorithms NAME` shows formula, keys and the names that other libraries use.")
    else:
        print("\n".join(_described(names[0])))
    return 0


def _known(name: str) -> str:
    from forge.config.algorithm_table import ALGORITHMS
    from forge.errors import ConfigError, did_you_mean

    if name in ALGORITHMS:
        return name
    raise ConfigError(
        "there is no such algorithm",
        path="forge algorithms NAME",
        value=name,
        rule=f"one of {', '.join(ALGORITHMS)}",
        repair=did_you_mean(name, tuple(ALGORITHMS)) or "`forge algorithms` lists them",
    )


def _fields(name: str) -> dict[str, Any]:
    from forge.config.algorithm_table import ALGORITHMS

    facts = ALGORITHMS[name]
    found: dict[str, Any] = {"title": facts.title, "key": facts.key}
    if facts.advantage:
        found["advantage"] = facts.advantage
    return {
        **found,
        "loss": facts.loss,
        "sets": dict(_keys(name)),
        "reference": facts.reference,
        "peers": dict(facts.peers),
    }


def _keys(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the keys that a preset sets, with their values."""
    from forge.config.algorithm_presets import PRESETS

    def below(values: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for key, value in values.items():
            if isinstance(value, Mapping):
                yield from below(value, f"{path}.{key}")
            else:
                yield f"{path}.{key}", value

    yield from below(PRESETS.get(name, {}), "algorithm")


def _described(name: str) -> Iterator[str]:
    fields = _fields(name)
    yield f"{name}: {fields['title']}"
    yield f"  selected by  {fields['key']}"
    if "advantage" in fields:
        yield f"  advantage A  {fields['advantage']}"
    yield f"  loss         {fields['loss']}"
    sets = [f"{key}={json.dumps(value)}" for key, value in fields["sets"].items()]
    if fields["key"].startswith("algorithm.preset"):
        yield f"  sets         {', '.join(sets) or 'nothing: its values are the defaults'}"
    yield f"  reference    {fields['reference']}"
    for peer, word in fields["peers"].items():
        yield f"  in {peer:9} {word}"
