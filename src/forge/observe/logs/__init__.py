"""What a program and its processes log: to the console, and to one file for each process in the run's folder."""

from forge.observe.logs.folder import LogFolder, current_folder, logging_to, logging_where_asked
from forge.observe.logs.setup import start_logging

__all__ = ["LogFolder", "current_folder", "logging_to", "logging_where_asked", "start_logging"]
