"""The texts: the docstrings of Python's standard library, as numbers. Nothing is downloaded."""

from __future__ import annotations

import ast
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3"}
NOTHING, BEGIN, RARE = 0, 1, 2  # padding, the beginning of a text, and words outside the vocabulary
SPECIAL = 3
IGNORED = -100


def docstrings() -> list[str]:
    """The docstring of each module, class and function, in the order of the files."""
    return [text for file in _files() for text in _texts_of(file)]


def _files() -> Iterator[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return (file for file in sorted(root.rglob("*.py")) if not LEFT_OUT & set(file.relative_to(root).parts))


def _texts_of(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):  # some files of the library are wrong on purpose
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""


def words_of(text: str) -> list[str]:
    """Words and single punctuation marks."""
    return re.findall(r"\w+|[^\w\s]", text)


class Corpus:
    """All texts as sequences of token numbers.

    Args:
        longest (int): The largest number of tokens in a text; the rest is cut off.
        vocabulary (int): The number of different tokens; the most frequent words have their own.
    """

    def __init__(self, longest: int = 128, vocabulary: int = 2000) -> None:
        texts = [words for text in docstrings() if (words := words_of(text))]
        frequent = Counter(word for words in texts for word in words).most_common(vocabulary - SPECIAL)
        number = {word: place + SPECIAL for place, (word, _) in enumerate(frequent)}
        self.longest = longest
        self.sequences = [[BEGIN, *(number.get(word, RARE) for word in words)][: longest + 1] for words in texts]

    @property
    def lengths(self) -> list[int]:
        """The number of labelled tokens of each sequence: all but the last."""
        return [len(words) - 1 for words in self.sequences]

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and labels, both of shape (longest,). The label of a token is the next token."""
        sequence = self.sequences[int(index)]
        tokens = np.full(self.longest, NOTHING, np.int32)
        labels = np.full(self.longest, IGNORED, np.int32)
        tokens[: len(sequence) - 1] = sequence[:-1]
        labels[: len(sequence) - 1] = sequence[1:]
        return tokens, labels
