"""Sphinx, MyST and furo: `sphinx-build -W -b html docs build/docs`, offline."""

project = "pagedkv"
author = "The pagedkv developers"
extensions = ["myst_parser"]
html_theme = "furo"
html_title = "pagedkv"
myst_heading_anchors = 3
exclude_patterns: list[str] = []
