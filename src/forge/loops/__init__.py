"""The loops: each is one page that sees the whole of a run."""
