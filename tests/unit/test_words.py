"""Words and units of docs/concepts.md, in all that people read: messages, settings, pages."""

import ast
import re
from pathlib import Path

import pytest
from package_trees import nodes_of

import hybridrl

PACKAGE = Path(hybridrl.__file__).parent
ROOT = PACKAGE.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("recipes/*/*.[my]*")])
NAMES = r"(?i)expert.iteration|[AHB]\d+(-SXM\d)?-\d+GB|H100 80GB"
"""An algorithm, and GPUs as their makers call them."""
WRONG = {
    r"\biterations?\b": "a step, or an update",
    r"\brun director(y|ies)\b": "the run folder",
    r"\bmicrobatch(es)?\b(?![_=`.])": "a micro-batch",
    r"\bminibatch(es)?\b(?![_=`.])": "a mini-batch",
    r"(?<![A-Za-z])[kKMGT]B\b(?!/s)": "KiB, MiB, GiB",
    r"\d ?secs?\b": "1.2 s",
    r"\ds\b(?!\.\w)(?=[ ,.;:)]|$)": "1.2 s, with a space",
    r"\d %(?![\w({])": "12%, without a space",
    r"\btok/s|\btokens (a|per) second\b": "tokens/s",
}


def sentences(file):
    """Strings of a module that have a blank, with their lines: what it says, and no names."""
    parts = {
        id(part)
        for node in nodes_of(file)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in nodes_of(file):
        if id(node) in parts:
            continue
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(map(shown, node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node.lineno, node.value


def shown(part):
    """Of a string with values in it: text, a number (which is formatted), or something else."""
    if isinstance(part, ast.Constant):
        return part.value
    return "{}" if part.format_spec is None else "0"


def faults(text):
    text = re.sub(NAMES, "", text)
    return [
        f"{found[0]!r}: write {right}"
        for wrong, right in WRONG.items()
        for found in re.finditer(wrong, text)
    ]


def test_modules_say_it_in_the_words_of_the_glossary():
    found = [
        f"{file.relative_to(ROOT)}:{line}: {fault}"
        for file in PACKAGE.rglob("*.py")
        for line, text in sentences(file)
        for fault in faults(text)
    ]
    assert not found, "\n".join(found)


def test_pages_say_it_in_the_words_of_the_glossary():
    assert len(PAGES) > 25
    found = [
        f"{page.relative_to(ROOT)}:{number}: {fault}"
        for page in PAGES
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for fault in faults(line)
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "after 3 iterations",
        "in the run directory.",
        "needs 12 GB",
        "needs 12GB",
        "it took 1.2s, and",
        "12 % of it",
        "40 tokens a second",
        "each microbatch is",
    ],
)
def test_wrong_words_are_found(text):
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "actor.tokens_per_microbatch=4096, 12% of 1.5 GiB in 1.2 s at 900 GB/s",
        "on A100-80GB, algorithm=expert_iteration",
        "{}s of {}",
        "%d of %d pairs",
    ],
)
def test_names_are_no_wrong_words(text):
    assert not faults(text)
