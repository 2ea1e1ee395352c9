"""Each option is written once, in `Options` : the cell's signature and docstring and the docs agree with it; each rule
has an error of its own. That options which no rule refuses go together: test_setups.py.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import mindspore as ms
import pytest
from mindspore import nn

from gaccum_ms import (
    ClipByValue,
    CountMask,
    EvenSplit,
    GradAccumulationCell,
    GradAccumulator,
    MaxTokens,
    SkipSpikes,
    WindowBatchNorm,
    WithBatchLossCell,
)
from gaccum_ms.options.compatibility import RULES
from gaccum_ms.options.compatibility import refused as first_refused
from gaccum_ms.options.options import Options
from gaccum_ms.options.rules import Setup

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"

# -- signature and docstring -------------------------------------------------------------------------------------------


def arguments(kind):
    return {
        name: argument
        for name, argument in inspect.signature(kind.__init__).parameters.items()
        if name not in ("self", "network")
    }


def fields():
    return {field.name: field for field in dataclasses.fields(Options)}


def test_the_signature_has_the_options():
    """It is literal text, because type checkers and editors read it."""
    assert list(arguments(GradAccumulationCell)) == list(fields())


@pytest.mark.parametrize("kind", [GradAccumulationCell, GradAccumulator])
def test_defaults_and_types_are_those_of_the_options(kind):
    shared = arguments(kind).keys() & fields().keys()
    assert len(shared) >= 7
    for name in shared - {"accumulation_steps", "jit"} if kind is GradAccumulator else shared:
        field, argument = fields()[name], arguments(kind)[name]
        assert argument.default == field.default, name
        assert argument.annotation == arguments(GradAccumulationCell)[name].annotation, name
        assert field.type in (argument.annotation, "Any"), name


def described_options():
    """Of the cell's docstring, for each option: its first sentence, and its default."""
    text = inspect.getdoc(GradAccumulationCell)
    text = text[text.index("micro_size (int") : text.index("Inputs:")]
    found = {}
    for name, body in re.findall(
        r"^ *(\w+) \([^)]*optional\): (.*?)(?=^ *\w+ \([^)]*optional\): |\Z)", text, re.M | re.S
    ):
        words = " ".join(body.split())
        default = re.search(r"Default: ``(.*?)``", words)
        first = re.split(r"(?<=[\w)`]) ?\. (?=[A-Z:`*])", words)[0]
        found[name] = first, default and default[1]
    return found


def test_the_docstring_has_the_options():
    found = described_options()
    assert list(found) == list(fields())
    for name, (sentence, default) in found.items():
        assert default == repr(fields()[name].default).replace("'", '"'), name
        assert sentence, name


# -- which go together -------------------------------------------------------------------------------------------------

TWO = {"loss_weights": (1.0, 0.5)}
THREE = {"loss_weights": (1.0,) * 3, "count": (None, None, CountMask())}
AUTO = {"micro_batch_size": "auto"}


def in_two(x, y):
    return [(x[:2], y[:2]), (x[2:], y[2:])]


BY_FUNCTION = {"split": in_two}

# For each rule, in order: options that break it and no rule before it, the words of the error, and "batch" for a loss
# of the batch, "sum" or "none" for a loss that says so, "distributed" for semi-auto and auto parallel mode, or "pools"
# for a network with WindowBatchNorm.
BROKEN = [
    ({}, "need graph mode, because .* but got PyNative mode. Use"),
    ({}, "which take each micro-batch once, but got a network of class", "batch"),
    (
        {"accumulation_steps": 3, "count": (CountMask(),), "overflow": "drop_micro_batch", **TWO},
        r"accumulation_steps=3, overflow='drop_.*', count=\(CountMask.*\), loss_weights=\(1.0, 0.5\). Leave",
        "batch",
    ),
    ({"aux": True, "record_noise": True, **TWO}, "but got record_noise=True, aux=True and 2 loss.es.. Leave"),
    (TWO, "a pipeline the network must return one loss, .* but got 2 losses. Return their"),
    ({"split": EvenSplit(axis=1), "micro_batch_size": 2}, r"but got micro_batch_size=2, split=EvenSplit\(.*=1\). Give"),
    ({}, "that one micro-batch can be tried with, but got a 'WithBatchLossCell'", "batch"),
    ({}, "must be 'stand_alone' or 'data_parallel', but got 'stand_alone': there", "distributed"),
    ({**BY_FUNCTION, "micro_size": 2}, "makes the micro-batches, .* got micro_size=2 and micro_batch_size=None. Leave"),
    ({"micro_size": 2, "micro_batch_size": 3}, "exactly one of .* got micro_size=2, micro_batch_size=3 and acc.*=1.$"),
    ({**AUTO, "jit": False}, "compiles in PyNative mode too, .* got jit=False. Leave 'jit' out"),
    (BY_FUNCTION, "need Python at each batch, .* but the training step is part of another graph"),
    ({"split": MaxTokens("auto", len)}, r"but got micro_batch_size=None and split=.*MaxTokens.*. Give 'micro_size'"),
    ({"accumulation_steps": 2}, "in a pipeline 'accumulation_steps' must be 1, .* but got 2. Use"),
    (
        {"reduction": "mean"},
        "must be what the loss says, .* reduction='mean' and a 'MSELoss' with .*'sum'. Leave",
        "sum",
    ),
    ({}, "the loss must be one number, .* but got a 'MSELoss' with reduction='none', which", "none"),
    ({"reduction": "sum", **TWO}, "reduction='sum' with 'loss_weights' needs .* got count=None"),
    ({"reduction": "ratio", "count": CountMask()}, "reduction='ratio' .* got count=CountMask.*. Leave"),
    ({"reduction": "ratio", **TWO}, "reduction='ratio' is for one loss, .* but got 2 losses. Return sums"),
    ({"min_count": 1.0}, "least count of items .* got min_count=1.0, count=None and reduction=None. Leave"),
    ({"count": (CountMask(),) * 2}, r"one entry for each loss, but got count=\(.*\) and loss_weights=\(1.0,\).$"),
    (THREE, "pools a micro-batch's statistics in each forward, .* but got 3 losses. Add", "pools"),
    ({"transforms": (SkipSpikes(2.0),), "max_grad_norm": 1.0}, "leaves no spike .* 'ClipByGlobalNorm'. Give"),
    ({"transforms": (abs, ClipByValue(1.0))}, "one device's part there, but got abs. Give a Transform whose class"),
    ({"overflow": "drop_micro_batch", "reduction": "sum"}, "='drop_micro_batch', record_noise=False, .*=None. Give"),
    ({"split": MaxTokens(8, len)}, "fills micro-batches up with rows of padding, .* but got count=None"),
    ({"split": EvenSplit(shared=(1,))}, r"pipeline the argument 'split' must be None, but got EvenSplit\(shared=\(1,"),
    (BY_FUNCTION, "must be the network's inputs, .* but got a function as 'split': only"),
    (BY_FUNCTION, "must be so many samples of the batch, .* but got a function as 'split': only"),
    ({"split": MaxTokens(8, len)}, "each number is a row of the report, but got 'split' of class 'MaxTokens', whose"),
]


@pytest.mark.parametrize(("rule", "broken"), zip(RULES, BROKEN, strict=True))
def test_each_rule_has_its_own_error(rule, broken):
    options, words, *kind = broken
    net = nn.Dense(1, 1)
    loss = nn.MSELoss(kind[0]) if kind and kind[0] in ("sum", "none") else nn.MSELoss()
    network = WithBatchLossCell(net, net) if kind == ["batch"] else nn.WithLossCell(net, loss)
    if kind == ["pools"]:
        network = nn.WithLossCell(nn.SequentialCell(WindowBatchNorm(1), net), nn.MSELoss())
    setup = Setup(
        Options(**{"accumulation_steps": 1, "loss_weights": (1.0,), **options}), network, kind == ["distributed"]
    )
    ms.set_context(mode=ms.PYNATIVE_MODE if "PyNative" in rule.what else ms.GRAPH_MODE)
    error = first_refused(rule.place, "Owner", setup)
    assert type(error) is rule.error
    with pytest.raises(rule.error, match=f"For 'Owner', .*{words}"):
        raise error
    assert str(error) == rule.message("Owner", setup)


def test_the_plain_options_go_together_everywhere():
    setup = Setup(Options(micro_size=2, accumulation_steps=1, loss_weights=(1.0,)), nn.Dense(1, 1))
    places = {rule.place for rule in RULES}
    assert {place: first_refused(place, "Owner", setup) for place in places} == dict.fromkeys(places)


def rules():
    """In groups of the same option, as a user looks for what was wanted; a row for each remedy."""
    beside: dict[tuple[str, str], dict[str, None]] = {}
    for rule in RULES:
        beside.setdefault((rule.what, rule.instead), {})[rule.beside] = None
    wanted = list(dict.fromkeys(what for what, _ in beside))
    rows = [(what, "; ".join(names), instead) for (what, instead), names in beside.items()]
    return [("what", "does not go with", "instead"), *sorted(rows, key=lambda row: wanted.index(row[0]))]


def options():
    """The docs' words: those of the docstring, without its marks."""
    rows = [("option", "default", "what it is")]
    for name, (sentence, default) in described_options().items():
        words = re.sub(r":\w+:(`[^`]*`)", r"\1", sentence).replace("``", "`").replace("` ,", "`,").replace("` ;", "`;")
        rows.append((f"`{name}`", f"`{default}`", words.removesuffix(".") + "."))
    return rows


def table(rows):
    header, *others = rows
    return "\n".join(f"| {' | '.join(line)} |" for line in (header, ("---",) * len(header), *others))


def test_the_page_has_both_tables():
    """`python tests/options/test_each_option.py` prints them."""
    text = PAGE.read_text()
    assert table(options()) in text
    assert table(rules()) in text


if __name__ == "__main__":
    print(table(options()), table(rules()), sep="\n\n")
