"""A strict reader of Prometheus' text format 0.0.4, for tests of what is exported."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\[\\n"])*)"(?:,|$)')

Labels = tuple[tuple[str, str], ...]


@dataclass
class Family:
    """A metric: its type, and its samples by name and labels."""

    kind: str
    text: str
    samples: dict[tuple[str, Labels], float] = field(default_factory=dict)


def parse(text: str) -> dict[str, Family]:
    """Return the metrics of an export by name. Whatever breaks the format's rules raises `AssertionError`."""
    assert text.endswith("\n"), "the last line must end"
    families: dict[str, Family] = {}
    texts: dict[str, str] = {}
    current = ""
    for line in text.splitlines():
        if line.startswith("# HELP "):
            name, _, about = line.removeprefix("# HELP ").partition(" ")
            assert _NAME.fullmatch(name), line
            assert name not in texts, f"HELP of {name} twice"
            assert about, f"{name} is not described"
            texts[name] = about
        elif line.startswith("# TYPE "):
            name, kind = line.removeprefix("# TYPE ").split(" ")
            assert kind in ("counter", "gauge", "histogram"), line
            assert name in texts, "HELP comes before TYPE"
            assert name not in families, f"TYPE of {name} twice"
            assert (kind == "counter") == name.endswith("_total"), name
            families[name] = Family(kind, texts[name])
            current = name
        else:
            found = _SAMPLE.fullmatch(line)
            assert found is not None, line
            name, labels = found["name"], _labels(found["labels"])
            family = families[current]
            suffixes = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
            assert name in [current + suffix for suffix in suffixes], f"{name} is not in its group"
            assert (name, labels) not in family.samples, f"{line}: twice"
            value = float(found["value"])
            assert family.kind == "gauge" or value >= 0, line
            family.samples[name, labels] = value
    for name, family in families.items():
        if family.kind == "histogram":
            _check_histogram(name, family)
    return families


def _labels(text: str | None) -> Labels:
    if text is None:
        return ()
    pairs, at = [], 0
    while at < len(text):
        found = _LABEL.match(text, at)
        assert found is not None, text
        pairs.append((found[1], re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], found[2])))
        at = found.end()
    names = [name for name, _ in pairs]
    assert len(set(names)) == len(names), text
    return tuple(pairs)


def _check_histogram(name: str, family: Family) -> None:
    rows: dict[Labels, list[tuple[float, float]]] = {}
    for (sample, labels), value in family.samples.items():
        if sample == f"{name}_bucket":
            bound = float(dict(labels)["le"])
            rows.setdefault(tuple(pair for pair in labels if pair[0] != "le"), []).append((bound, value))
    for labels, buckets in rows.items():
        assert buckets == sorted(buckets), f"{name}: bounds ascend, and counts never fall"
        assert [count for _, count in buckets] == sorted(count for _, count in buckets), name
        assert math.isinf(buckets[-1][0]), f"{name} has no bucket +Inf"
        assert buckets[-1][1] == family.samples[f"{name}_count", labels], name
        assert (f"{name}_sum", labels) in family.samples
