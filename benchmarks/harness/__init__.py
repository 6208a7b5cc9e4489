"""What the benchmarks share: how to measure on a busy machine, and how to print what was found."""
