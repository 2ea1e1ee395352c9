"""The site: `bash run.sh docs` builds it from the pages in this folder and the docstrings, warnings as errors."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))

project = "gaccum_ms"
author = "gaccum_ms"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

myst_heading_anchors = 3

# Docstrings have MindSpore's form: Google's sections, and three of its own.
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["Inputs", "Outputs", "Supported Platforms"]
autodoc_typehints = "none"  # docstrings say types, in MindSpore's words

# Nothing is loaded from elsewhere when a page is read.
html_theme = "alabaster"
html_theme_options = {
    "description": "Gradient accumulation for MindSpore",
    "fixed_sidebar": True,
    "page_width": "1100px",
}
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


def draw_pictures(app) -> None:
    """Run each program of a page that draws one; the page shows what it has drawn."""
    pictures = DOCS / "howto" / "pictures"
    pictures.mkdir(exist_ok=True)
    for page in sorted((DOCS / "howto").glob("*.md")):
        for number, program in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)):
            if "savefig(" in program:
                _run(program, f"{page.stem}_{number}.py", pictures)


def _run(program: str, name: str, pictures: Path) -> None:
    # In a folder of its own, so that two builds may run at once. Graph mode reads its source, so it is a file.
    with tempfile.TemporaryDirectory(dir=pictures) as folder:
        script = Path(folder) / name
        script.write_text(program)
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONPATH": path, "MPLBACKEND": "Agg"}
        subprocess.run([sys.executable, script], cwd=folder, env=env, check=True, stdout=subprocess.DEVNULL)
        for picture in Path(folder).glob("*.png"):
            picture.replace(pictures / picture.name)


def setup(app) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-signature", class_signature)
    app.connect("builder-inited", draw_pictures)
