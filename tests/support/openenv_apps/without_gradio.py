"""Leave out Gradio, for a web page that no test opens: half of the time that a server takes to start."""

from __future__ import annotations

import sys
from unittest.mock import MagicMock

for name in ("gradio", "gradio.themes"):
    sys.modules.setdefault(name, MagicMock(name=name))
