"""The files that every project of `forge new` has, with places for what differs."""

from __future__ import annotations

from typing import Final

MAIN: Final = '''"""A tiny model learns {summary}: python main.py [--seed N] [key=value …]."""

from __future__ import annotations

from pathlib import Path

from {module} import {writer}
from warm_start import main

if __name__ == "__main__":
    main(Path(__file__).resolve().parent, {writer})
'''

PYPROJECT: Final = """\
[project]
name = "{name}"
version = "0.1.0"
requires-python = ">=3.11,<3.14"
dependencies = ["torchforge~={version}"]

[dependency-groups]
dev = ["pytest>=8"]

[tool.pytest.ini_options]
pythonpath = ["."]
testpaths = ["tests"]

[tool.uv]
package = false # a folder of programs; there is nothing to build
"""

GITIGNORE: Final = """\
__pycache__/
.pytest_cache/
.venv/
models/
runs/
"""

README: Final = """\
# {name}

A tiny model learns {summary}. Made with `forge new`; it runs as it is, on a CPU, in about a minute.

```bash
{command}
```

The run's folder is in `runs/`. `forge ui` shows it in a browser, `forge report` writes it as a page, and `forge chat`
opens the model that it ends with.

## Test

```bash
python -m pytest
```

After the first run, `forge config check {config}` says what a change would do, or what is wrong with it. It starts
nothing.

## Make it yours

{changes}

Any key can be set on the command line, too: `{command} training.max_steps=3`.
"""
