"""Fault injection for whole runs: `forge chaos`.

`script` makes the list of faults from a seed, `processes` finds what they hit, `faults` injects them, `experiment` runs
a configuration with and without them, and `verdict` says what the faults cost and whether a guarantee was broken.
"""
