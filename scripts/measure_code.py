"""Measure the shape of the source: lines, modules, and how modules depend on each other.

    python scripts/measure_code.py [--root FOLDER] [--most 10]

Prints one figure per line; docs/decisions.md quotes them. With --root it measures another checkout.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

LONGEST = 450


def modules(root: Path) -> dict[str, Path]:
    """Return the modules of the package by their dotted names."""
    source = root / "src"
    found = {}
    for path in sorted((source / "forge").rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield every name that a module imports, wherever in the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{each.name}" for each in node.names)


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure the shape of the source.")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[1], help="the checkout")
    parser.add_argument("--most", type=int, default=10, help="how many of the longest modules to name")
    given = parser.parse_args()
    known = modules(given.root)
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in known.items()}
    lines = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in known.items()}
    importers: Counter[str] = Counter()
    for name, tree in trees.items():
        importers.update({other for other in imported(tree) if other in known and other != name})
    lengths = sorted(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    native = [path for path in (given.root / "src").rglob("*") if path.suffix in (".c", ".h")]
    print(f"lines of Python      {sum(lines.values())}")
    print(f"lines of C           {sum(len(path.read_text(encoding='utf-8').splitlines()) for path in native)}")
    print(f"modules              {len(known)}")
    print(f"with one importer    {sum(importers[name] == 1 for name in known)}")
    print(f"functions            {len(lengths)}, median {lengths[len(lengths) // 2]} lines")
    print(f"over {LONGEST} lines       {sum(count > LONGEST for count in lines.values())}")
    for name, count in sorted(lines.items(), key=lambda each: -each[1])[: given.most]:
        print(f"  {count:4d} {name}")


if __name__ == "__main__":
    main()
