"""Sphinx configuration of the site: ``make docs``. Nothing is fetched, neither by the build nor by a reader's browser.

The source is the whole checkout, so that a page may link to a result file or a recipe as it does on a code host.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "compopt"
author = "compopt contributors"
copyright = author
pyproject = (ROOT / "pyproject.toml").read_text()
release = version = re.search(r'^version = "(.+)"$', pyproject, re.M).group(1)
repository = re.search(r'^repository = "(.*?)"', pyproject, re.M).group(1)

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = [".*", "build", "runs", "**/__pycache__", "docs/extensions", "docs/static"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "extensions.mathml",
    "extensions.executed",
    "extensions.paths",
]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache"]

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_custom_sections = ["State", "Communication", "Shapes"]

highlight_language = "none"  # of blocks that name none: commands, trees of folders
html_theme = "furo"  # a search box, light and dark, and no font or script from elsewhere
html_title = f"compopt {release}"
html_theme_options = {"source_repository": repository, "source_branch": "main"} if repository else {}
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["static/index.html"]
html_math_renderer = "mathml"
html_copy_source = False
html_show_sphinx = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
