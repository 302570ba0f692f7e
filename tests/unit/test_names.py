"""Every public name can be searched for: it has one home and says what kind of thing it is."""

import ast
import re
from collections import defaultdict
from pathlib import Path

from package_trees import nodes_of, tree_of

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


OF_OTHERS = {"setsockopt", "ptrace", "post_backward", "http_proxy", "hybridrl_reward_mean"}
OF_OTHERS |= {"MLFLOW_TRACKING_URI", "TRACKIO_DIR", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"}
OF_OTHERS |= {"DatasetDict", "save_to_disk"}
"""What docstrings name of the kernel, of torch and of other packages."""
NAMED = re.compile(r"(?<!`)`([A-Za-z_][\w.]*)(?:\([^`]*\))?`")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def test_names_in_docstrings_exist():
    docstrings, known = [], set(OF_OTHERS)
    for file in ROOT.rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        known.add(file.stem)
        lines = text.splitlines()
        for node in nodes_of(file):
            if isinstance(node, DOCUMENTED) and (said := ast.get_docstring(node)):
                docstrings.append((file, said))
                held = node.body[0]
                for line in range(held.lineno - 1, held.end_lineno):
                    lines[line] = ""
        known.update(re.findall(r"\w+", "\n".join(lines)))
    for file in ROOT.rglob("*.yaml"):
        known.update(re.findall(r"\w+", file.read_text(encoding="utf-8")))
    stale = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, said in docstrings
        for name in NAMED.findall(said)
        if name.rpartition(".")[2] not in known and not re.search(r"\.(py|json|md|yaml)$", name)
    ]
    assert not stale, "\n".join(stale)
