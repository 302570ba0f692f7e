"""Every public name can be searched for: it has one home and says what kind of thing it is."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from package_trees import tree_of

import hybridrl

ROOT = Path(hybridrl.__file__).parent
FOUND_BY_NAME = {"Adapter", "Trainer"}
"""Classes that every module of a kind has, under the name that the kind is loaded by."""


def homes_of(kinds):
    """The modules that define each public name of these kinds."""
    homes = defaultdict(set)
    for file in ROOT.rglob("*.py"):
        for node in tree_of(file).body:
            if isinstance(node, kinds) and not node.name.startswith("_"):
                homes[node.name].add(file.relative_to(ROOT).as_posix())
    return homes


def share_of_one_word(names):
    words = [len(re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)) for name in names]
    return sum(count == 1 for count in words) / len(words)


def test_a_class_has_one_home():
    homes = homes_of(ast.ClassDef)
    twice = {name: files for name, files in homes.items() if len(files) > 1}
    assert twice.keys() <= FOUND_BY_NAME, twice


def test_names_say_what_kind_of_thing_they_are():
    assert share_of_one_word(homes_of(ast.ClassDef)) <= 0.15
    assert share_of_one_word(homes_of((ast.FunctionDef, ast.AsyncFunctionDef))) <= 0.12
