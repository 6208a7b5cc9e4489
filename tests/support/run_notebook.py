"""Run the code cells of a notebook one after the other in one event loop, as a Jupyter kernel does.

python tests/support/run_notebook.py NOTEBOOK

The cells are the module `__main__`, as in a kernel: what they define travels to other processes by value. A cell may
`await` at its top level. The first cell that fails ends it, with a traceback that shows the cell's lines.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import sys
import types
from collections.abc import Iterator
from pathlib import Path


def code_cells(notebook: Path) -> Iterator[str]:
    content = json.loads(notebook.read_text(encoding="utf-8"))
    for cell in content["cells"]:
        if cell["cell_type"] == "code":
            yield "".join(cell["source"])


async def run_cells(notebook: Path) -> None:
    kernel = types.ModuleType("__main__")
    sys.modules["__main__"] = kernel
    for number, source in enumerate(code_cells(notebook), start=1):
        name = f"{notebook.name}[{number}]"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        code = compile(source, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        print(f"== cell {number}", flush=True)
        running = eval(code, kernel.__dict__)
        if inspect.iscoroutine(running):
            await running


if __name__ == "__main__":
    asyncio.run(run_cells(Path(sys.argv[1])))
