"""Configurations of other projects, converted to ours: `forge import`.

    conversion = forge.migration.convert_file("trl", "grpo.yaml")
    conversion.config    # our keys, nested, for forge.config.load
    conversion.differs   # what means something else here, or has another default

A project is a table of rules (`forge.migration.trl` and so on) over the keys and defaults of one of its versions
(`forge.migration.keys`). Files are read, never run.
"""

from forge.migration.converting import convert
from forge.migration.projects import PROJECTS, convert_file
from forge.migration.records import Computed, Conversion, Options, Row, Todo, Unknown

__all__ = [
    "PROJECTS",
    "Computed",
    "Conversion",
    "Options",
    "Row",
    "Todo",
    "Unknown",
    "convert",
    "convert_file",
]
