"""Runs in a Jupyter notebook: a display that changes while a run takes its steps, and results with charts.

Nothing here imports IPython unless a notebook has. Charts are SVG inside of HTML: no package, no script, no network,
and a saved notebook shows them as they were."""

from forge.observe.notebook.kernel import is_notebook, without_groups
from forge.observe.notebook.live import NotebookSink

__all__ = ["NotebookSink", "is_notebook", "without_groups"]
