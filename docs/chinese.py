"""The site in Chinese, by Sphinx's own catalogs: locale/ has one for each page that is translated, and sphinx.po for
the words around the pages."""

from __future__ import annotations

import re
from pathlib import Path

from babel.messages import Catalog
from babel.messages.pofile import read_po, write_po
from docutils import nodes
from sphinx.search.en import SearchEnglish
from sphinx.transforms import SphinxTransform
from sphinx.util.logging import getLogger
from sphinx.util.nodes import extract_messages

CATALOGS = Path("locale", "zh_CN", "LC_MESSAGES")
LOGGER = getLogger(__name__)
LABEL = re.compile(r'(?<=aria-label=")[^"]+|(?<=>)[^<>]*[a-z][^<>]*(?=</text>)')  # of a drawing
HEADER = b'msgid ""\nmsgstr ""\n"Content-Type: text/plain; charset=utf-8\\n"\n\n'


class KeepTexts(SphinxTransform):
    """Keeps a page's texts for `check_catalogs`; translates those of its drawings, which Sphinx leaves as they are."""

    default_priority = 15  # at 20 Sphinx translates the others

    def apply(self) -> None:
        self.document["texts"] = texts = {text: None for _, text in extract_messages(self.document)}
        catalog = read_catalog(self.env.srcdir, self.env.docname) if self.config.language == "zh_CN" else Catalog()
        for drawing in self.document.findall(nodes.raw):
            texts |= dict.fromkeys(LABEL.findall(drawing.astext()))
            labels = {message.id: message.string for message in catalog if message.string}
            text = LABEL.sub(lambda label, labels=labels: labels.get(label[0], label[0]), drawing.astext())
            drawing.children = [nodes.Text(text)]


def read_catalog(docs: Path, page: str) -> Catalog:
    """That of a page without one is empty."""
    path = docs / CATALOGS / f"{page}.po"
    return read_po(path.read_bytes().splitlines(keepends=True)) if path.exists() else Catalog()


def check_catalogs(app, environment) -> None:
    """Warn, which ends a build, if a catalog lacks a translation, or has a text that its page no longer has. The
    catalog then gets the page's texts: a new one is empty, or has a fuzzy translation, that of a similar text."""
    for page in sorted(environment.found_docs):
        path = app.srcdir / CATALOGS / f"{page}.po"
        if not path.exists():
            continue
        catalog = read_catalog(app.srcdir, page)
        texts = environment.get_doctree(page)["texts"]
        old = [*catalog.obsolete, *(message.id for message in catalog if message.id and message.id not in texts)]
        if old or any(text not in catalog for text in texts):
            update(path, catalog, texts)
        lacking = [text for text in texts if not catalog[text].string or catalog[text].fuzzy]
        for fault, faulty in ("has no translation, or a fuzzy one,", lacking), ("still had a translation", old):
            for text in faulty:
                LOGGER.warning("%s %s of %r", path.relative_to(app.srcdir), fault, text, location=page)


def update(path: Path, catalog: Catalog, texts: dict[str, None]) -> None:
    page = Catalog()
    for text in texts:
        page.add(text)
    catalog.update(page)
    with path.open("wb") as file:
        file.write(HEADER)
        write_po(file, catalog, omit_header=True, ignore_obsolete=True)


def name_languages(app, page, template, context, doctree) -> None:
    """For templates/page.html: whether a page of the Chinese site is not translated."""
    is_translated = (app.srcdir / CATALOGS / f"{page}.po").exists()
    context["english_only"] = app.config.language == "zh_CN" and doctree is not None and not is_translated


def name_english_pages(app, doctree) -> None:
    """The contents of the Chinese site say of a page that is not translated that it is English."""
    page = app.env.docname
    if app.config.language == "zh_CN" and not (app.srcdir / CATALOGS / f"{page}.po").exists():
        title = next(app.env.tocs[page].findall(nodes.reference))
        title += nodes.Text("（英文）")


class SearchChinese(SearchEnglish):
    """Words are pairs of Chinese characters, in pages and in what is searched for, so that any run of characters is
    found. A dictionary of words, as Sphinx's own `zh` uses, is not there in the browser."""

    lang = "zh"  # the language's name stays English: Sphinx calls that language's stemmer in the browser
    words = re.compile(r"[\u4e00-\u9fff](?=([\u4e00-\u9fff]))|\w+", re.ASCII)
    js_splitter_code = f"""
var splitQuery = (query) => [...query.matchAll(/{words.pattern}/g)].map((word) => word[0] + (word[1] ?? ""));
"""

    def split(self, input: str) -> list[str]:
        return [word[0] + (word[1] or "") for word in self.words.finditer(input)]


def setup(app) -> None:
    app.add_transform(KeepTexts)
    app.add_search_language(SearchChinese)
    app.connect("doctree-read", name_english_pages)
    app.connect("html-page-context", name_languages)
    app.connect("env-updated", check_catalogs)
