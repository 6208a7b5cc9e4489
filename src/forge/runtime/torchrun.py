"""`python -m forge.runtime.torchrun`: start the ranks of a script as torchrun does.

A signal is passed on to every rank, which saves and ends; the exit code is then 128 plus the signal's number, and no
traceback is printed. It is the same where a command stopped the ranks. Signals that were ignored from the start, as
SIGHUP is under nohup, stay ignored. A rank that refuses its input ends all of them, with its own message and exit code
2.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_WRONG_INPUT = 2
_STOPPED = 128 + signal.SIGINT


def main(arguments: Sequence[str]) -> int:
    """Run torchrun with its own arguments, and return the exit code."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main as torchrun

    heard = [name for name in _PASSED_ON if signal.getsignal(signal.Signals[name]) != signal.SIG_IGN]
    try:
        torchrun([f"--signals-to-handle={','.join(heard)}", *arguments])
    except SignalException as received:
        return 128 + int(received.sigval)
    except ChildFailedError as failure:
        code = failure.get_first_failure()[1].exitcode
        if code in (_WRONG_INPUT, _STOPPED):
            return int(code)  # the rank has said why
        print(failure, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
