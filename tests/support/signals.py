"""What processes that tests start need to hear signals as in a terminal."""

from __future__ import annotations

import signal


def hear_ctrl_c() -> None:
    """For `preexec_fn`: where the tests run in the background, Ctrl-C is ignored, and children inherit that."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
