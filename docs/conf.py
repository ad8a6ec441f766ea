"""The documentation as a site: Sphinx reads the pages of this folder and the docstrings of the public API."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rayqueue import __version__

project = "RayQueue"
author = "The RayQueue authors"
copyright = "the RayQueue authors, Apache-2.0"  # noqa: A001
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
root_doc = "index"
exclude_patterns = ["adr/0000-template.md"]
myst_heading_anchors = 3
myst_enable_extensions = ["colon_fence"]
highlight_language = "none"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True, "undoc-members": False}

html_theme = "furo"
html_title = f"RayQueue {version}"
html_static_path: list[str] = []
