"""The site: `bash run.sh docs` builds it from the pages in this folder and the docstrings, warnings as errors."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

project = "gaccum_ms"
author = "gaccum_ms"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Docstrings have MindSpore's form: Google's sections, and three of its own.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Inputs", "Outputs", "Supported Platforms"]
autodoc_typehints = "none"  # docstrings say types, in MindSpore's words

# Nothing is loaded from elsewhere when a page is read.
html_theme = "furo"
html_title = "gaccum_ms"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_math_renderer = "mathml"
html_show_copyright = False


def inline_math(writer, node) -> None:
    writer.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(writer, node) -> None:
    writer.body.append(f"<div class='math'>{tex2mathml(node.astext(), as_block=True)}</div>")
    raise nodes.SkipNode


def class_signature(app, what, name, item, options, signature, result) -> tuple[str, str | None] | None:
    """Cells take `*args, **kwargs` before their `__init__` sees them, and Sphinx would show that."""
    if what != "class":
        return None
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(item.__init__).parameters.values()
        if parameter.name != "self"
    ]
    return str(inspect.Signature(parameters)), result


def draw_charts(app) -> None:
    """Draw the charts that pages take in."""
    from charts import make_charts

    make_charts()


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-signature", class_signature)
    app.connect("builder-inited", draw_charts)
