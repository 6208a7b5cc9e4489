"""CPU kernels in C, compiled once per machine, and their Python bindings."""
