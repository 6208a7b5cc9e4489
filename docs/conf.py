"""How the documentation is built. `make docs` treats every warning as an error."""

from __future__ import annotations

from importlib.metadata import version as installed_version

project = "TorchForge"
author = "The TorchForge authors"
release = version = installed_version("torchforge")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"TorchForge {release}"

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
default_role = "code"

# Every reference to a name of ours must resolve. Names of other projects are not checked: their inventories would have
# to be fetched, and the build needs no network.
nitpicky = True
nitpick_ignore_regex = [
    (r"py:.*", r"(?!forge\.).*"),
    (r"py:.*", r"forge\..*\._.*"),
    (r"py:.*", r"forge\..*\.(F|C|P|R|T|Schema)"),
]
