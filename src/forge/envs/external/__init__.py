"""Environments of other projects, each in one file. What they need beside us runs in processes with their own venv."""
