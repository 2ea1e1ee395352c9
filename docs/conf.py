"""The site: `bash run.sh docs` builds it from the pages in this folder and the docstrings, warnings as errors."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path[:0] = [str(ROOT), str(DOCS)]

project = "gaccum_ms"
author = "gaccum_ms"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_reredirects",
    "chinese",
]

myst_heading_anchors = 3
myst_enable_extensions = ["attrs_block"]
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# `-D language=zh_CN` builds the Chinese site: chinese.py.
locale_dirs = ["locale"]
gettext_compact = False  # a catalog for each page, and not for each folder
templates_path = ["templates"]

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

# Old addresses: a page that moves gets a line. sphinx-reredirects makes a page for each, which leads on.
redirects: dict[str, str] = {
    "batchnorm": "how_it_works.html#batchnorm",
    "by_length": "split.html#as-many-tokens-as-fit",
    "contrastive": "outputs.html#losses-of-the-whole-batch",
    "equality": "how_it_works.html#what-equals-the-whole-batch",
    "extending": "architecture.html#a-transform",
    "howto/batch_size": "../batch_size.html",
    "launch_options": "launching.html#all-options",
    "networks": "how_it_works.html#optimizers",
    "noise": "batch_size.html#the-noise-scale",
    "overview": "options.html",
    "samples": "flow.html#samples-to-start-from",
    "sharding": "parallel.html#sharding-the-optimizer",
    "versions": "hardware.html#versions-of-mindspore",
}


def inline_math(writer, node) -> None:
    writer.body.append(mathml(node))
    raise nodes.SkipNode


def block_math(writer, node) -> None:
    writer.body.append(f"<div class='math'>{mathml(node, as_block=True)}</div>")
    raise nodes.SkipNode


def mathml(node, **options) -> str:
    """tex2mathml shows TeX's backslash before an underscore in a name."""
    formula = re.sub(r"\\text\{[^}]*\}", lambda text: text[0].replace(r"\_", "_"), node.astext())
    return tex2mathml(formula, **options)


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


def make_narrow_tables(app, page, template, context, doctree) -> None:
    """Let long words of code be broken behind punctuation, and nowhere else; name each cell's column, which site.css
    shows on a narrow page, where each cell has a line of its own."""
    body = context.get("body", "")
    body = re.sub(r'(?<=<span class="pre">)[^<]{21,}(?=</span>)', with_breaks, body)
    context["body"] = re.sub(r'<table class="docutils.*?</table>', with_labels, body, flags=re.DOTALL)


def with_breaks(word: re.Match) -> str:
    return re.sub(r"(?<=\w)([./=(,_])(?=\w)", r"\1<wbr>", word[0])


def with_labels(table: re.Match) -> str:
    heads = [re.sub("<[^>]*>", "", head) for head in re.findall('<th class="head.*?</th>', table[0], re.DOTALL)]

    def row(cells: re.Match) -> str:
        labels = iter(heads)
        return re.sub("<td", lambda _: f'<td data-label="{next(labels)}"', cells[0])

    return re.sub("<tr.*?</tr>", row, table[0], flags=re.DOTALL)


def draw_charts(app) -> None:
    """Draw the charts that pages take in."""
    from charts import make_charts

    make_charts()


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-signature", class_signature)
    app.connect("html-page-context", make_narrow_tables)
    app.connect("builder-inited", draw_charts)
