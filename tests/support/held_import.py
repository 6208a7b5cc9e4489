"""A module whose import takes as long as a test wants: until the FIFO at `HELD_IMPORT` has been written and closed."""

import os

with open(os.environ["HELD_IMPORT"]) as _held:
    _held.read()
