"""One page that shows a run: its curves, and what the policy said.

    from forge.observe.report import write_report
    write_report("runs/mine").path  # runs/mine/report.html

The page is one file with everything in it. It loads nothing from a server, so you can send it to others.
"""

from forge.observe.report.page import Report, write_report
from forge.observe.report.reading import Run, read_run

__all__ = ["Report", "Run", "read_run", "write_report"]
