"""A folder that is put on PYTHONPATH of an engine's processes: Python imports `sitecustomize` before anything else."""
