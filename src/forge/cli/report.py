"""`forge report`: one page that shows a run."""

from __future__ import annotations

import argparse
from pathlib import Path

_DEFAULT_SAMPLES = 400


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Register `report`."""
    parser = subparsers.add_parser(
        "report",
        help="make one self-contained HTML page of a run or an evaluation, with curves and samples",
        description="Make one HTML page of the folder of a run, or of a forge eval: its curves and samples. The page "
        "needs no network. A run that is still running, or was killed, is shown up to its last step.",
    )
    parser.add_argument(
        "run_dir", metavar="RUN_DIR", type=Path, help="folder of the run, with its metrics.jsonl, or of a forge eval"
    )
    parser.add_argument("--output", metavar="FILE", type=Path, help="where the page goes; default: RUN_DIR/report.html")
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    parser.add_argument(
        "--max-samples",
        metavar="N",
        type=int,
        default=_DEFAULT_SAMPLES,
        help="samples in the page, spread over the steps; default: %(default)s",
    )
    parser.set_defaults(handler=run)


def run(arguments: argparse.Namespace) -> int:
    """Carry out the command and return its exit code."""
    from forge.observe.report import write_report

    report = write_report(arguments.run_dir, output=arguments.output, max_samples=arguments.max_samples)
    samples = f", {report.num_shown} of {report.num_samples} samples" if report.num_samples else ""
    print(f"{report.path}: up to step {report.last_step}{samples}, {report.num_bytes / 1e6:.1f} MB")
    for note in report.notes:
        print(f"  {note}")
    if arguments.open:
        import webbrowser

        if not webbrowser.open(report.path.resolve().as_uri()):
            print("  No browser could be started here: open the file yourself.")
    return 0
