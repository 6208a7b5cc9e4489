"""Hides packages that cannot be imported, in processes that start with this folder on PYTHONPATH.

`FORGE_HIDDEN_MODULES` names them. Afterwards the `sitecustomize` that would have been found without this one runs.
"""

import contextlib
import importlib
import os
import sys

for _name in os.environ.get("FORGE_HIDDEN_MODULES", "").split(","):
    if _name:
        sys.modules.setdefault(_name, None)  # type: ignore[arg-type]

_here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _here]
_this = sys.modules.pop(__name__)
with contextlib.suppress(ModuleNotFoundError):
    importlib.import_module(__name__)
sys.modules.setdefault(__name__, _this)
