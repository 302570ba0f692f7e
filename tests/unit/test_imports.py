"""Who may import whom, and that nothing brings Ray or vLLM along unasked."""

import ast
import subprocess
import sys
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from package_trees import tree_of

import hybridrl

ROOT = Path(hybridrl.__file__).parent
EVERYBODY = {"errors", "config", "system.redaction", "run_files.run_paths"}
EVERYTHING = {"*"}
# A room is a package under hybridrl; of those that stand here one within another, the inner one
# counts. It may import itself, `EVERYBODY`, and what stands here: a room with all that is in it, or
# `=` and one module, which is an exception.
MAY_IMPORT = {
    "errors": set(),
    "system": set(),
    "batch": {"system"},
    "layout": {"system"},
    "algorithms": {"batch", "system"},
    "conversations": set(),
    "compress": {"system"},
    "sandbox": {"system"},
    "processes": {"system"},
    "environments": {"system", "processes"},
    "rewards": {"batch", "system", "sandbox", "processes"},
    "controller": {"batch", "layout", "system"},
    "checkpoint.tensors": {"layout", "system"},
    "models": {"batch", "layout", "system", "compress", "checkpoint.tensors"},
    "parallel": {
        *("layout", "system", "compress", "models"),
    },
    "data": {"batch", "system", "conversations", "environments", "processes"},
    "rollout": {"quantization", "batch", "layout", "system", "models"},
    "serving": {"batch", "system", "conversations", "environments", "rollout"},
    "weights": {
        *("batch", "layout", "system", "compress", "parallel", "rollout"),
    },
    "checkpoint.engine_state": {
        *("layout", "system", "checkpoint.tensors", "models", "parallel", "engine"),
    },
    "engine": {
        "quantization",
        *("batch", "layout", "system", "algorithms", "checkpoint.tensors", "models", "parallel"),
        *("compress", "weights", "rollout"),
    },
    "ray_backend": {"batch", "controller", "system", "checkpoint.copies"},
    "workers": {
        *("batch", "layout", "system", "algorithms", "models", "parallel", "engine", "weights"),
        *("rollout", "rewards", "data", "controller", "checkpoint.tensors", "compress"),
        *("checkpoint.engine_state", "conversations", "environments", "serving", "systems"),
        "quantization",
    },
    "placement": {"batch", "layout", "system", "controller"},
    "run_files": {"batch", "system"},
    "console": {"batch", "system"},
    "evaluation": {
        *("batch", "controller", "conversations", "data", "run_files", "rewards", "system"),
        "rollout",
    },
    "trainers": {
        *("batch", "system", "algorithms", "controller", "data", "evaluation", "run_files"),
        *("rewards", "rollout", "systems"),
    },
    "checkpoint.copies": set(),
    "checkpoint": {
        *("system", "layout", "run_files", "composition"),
        "checkpoint.tensors",
    },
    "run": {
        *("batch", "system", "algorithms", "trainers", "checkpoint", "controller", "console"),
        *("data", "evaluation", "rewards", "run_files", "composition"),
    },
    "config": set(),
    "composition": {"system"},
    "checks": {
        "quantization",
        *("batch", "layout", "system", "algorithms", "conversations", "data", "models", "parallel"),
        *("placement", "rewards", "rollout", "sandbox", "trainers", "evaluation", "systems"),
        *("environments", "run_files", "checkpoint"),
    },
    "planner": {
        "quantization",
        *("batch", "layout", "system", "controller", "models", "parallel", "placement", "trainers"),
        *("rollout", "run_files", "composition", "=checks.machine.placement_checks"),
    },
    "quantization": {"system", "models", "compress"},
    "systems.low_bits": {
        *("batch", "system", "models", "quantization", "systems", "trainers"),
    },
    "systems.unequal_generation": {
        *("batch", "layout", "system", "models", "rollout", "checkpoint.tensors"),
        *("quantization", "systems"),
    },
    "systems.operator_costs": {"batch", "system", "models", "planner"},
    "systems": {"system"},
    "report": {
        *("batch", "system", "console", "run_files", "checkpoint", "placement", "planner"),
        *("composition", "trainers"),
    },
    "doctor": {"system"},
    "job": EVERYTHING,
    "commands": {
        *("system", "checkpoint", "checkpoint.tensors", "doctor", "models", "planner", "report"),
        *("run_files", "trainers", "systems", "systems.low_bits", "systems.unequal_generation"),
        *("systems.operator_costs", "job", "cli", "checks", "composition", "quantization"),
    },
    # Modules beside the rooms: they put the others together.
    "": EVERYTHING,
    "main": EVERYTHING,
    "cli": EVERYTHING,
}


def module_name(file):
    """`batch.batch` for batch/batch.py, `batch` for batch/__init__.py, `` for hybridrl itself."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


@cache
def imports(name, file, named=False):
    """Every module that `file` imports when it runs, with the line, as a full dotted name.

    What stands under `if TYPE_CHECKING:` is for readers and type checkers only.

    Args:
        named: That too.
    """
    package = ["hybridrl", *name.split(".")] if name else ["hybridrl"]
    package = package if file.name == "__init__.py" else package[:-1]
    nodes, found = [tree_of(file)], []
    while nodes:
        node = nodes.pop()
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if for_types and not named:
            nodes.extend(node.orelse)
            continue
        nodes.extend(n for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr))
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.removeprefix("hybridrl.") in MODULES
                found.append((inner if is_module else base, node.lineno))
    return found


def room_of(name):
    """The innermost room of `MAY_IMPORT` that a module stands in; the first part of its name if it
    stands in none."""
    parts = name.split(".")
    outward = [".".join(parts[:end]) for end in range(len(parts), 0, -1)]
    return next((room for room in outward if room in MAY_IMPORT), parts[0])


def allowed(name, target):
    room, rules, parts = room_of(name), MAY_IMPORT[room_of(name)], target.split(".")
    around = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}  # with the module itself
    may = bool({"*", f"={target}", *around} & rules)
    return may or room == room_of(target) or bool({target, room_of(target)} & EVERYBODY)


def test_rooms_import_only_what_they_may():
    rooms = {room_of(name) for name in MODULES}
    assert rooms <= MAY_IMPORT.keys(), f"give {rooms - MAY_IMPORT.keys()} a line in MAY_IMPORT"
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {target}"
        for name, file in MODULES.items()
        for target, line in imports(name, file)
        if target.startswith("hybridrl.") and not allowed(name, target.removeprefix("hybridrl."))
    ]
    assert not wrong, "\n".join(wrong)


def test_exceptions_are_few_and_used():
    exceptions = {(room, e[1:]) for room, rules in MAY_IMPORT.items() for e in rules if e[0] == "="}
    used = {
        (room_of(name), target.removeprefix("hybridrl."))
        for name, file in MODULES.items()
        for target, _ in imports(name, file)
    }
    assert not exceptions - used, "take these out"
    assert len(exceptions) <= 10


def circle_of_files(named):
    """Files that import each other in a circle, as a sentence; empty if there are none."""
    prefix, graph = "hybridrl.", {}
    for name, file in MODULES.items():
        found = {target for target, _ in imports(name, file, named) if target.startswith(prefix)}
        graph[name] = {target.removeprefix(prefix) for target in found}
    if named:  # in the controller a call, its result and their executor know each other by name
        for name, targets in graph.items():
            if name.startswith("controller."):
                targets -= {target for target in targets if target.startswith("controller.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " imports ".join(reversed(error.args[1]))
    return ""


@pytest.mark.parametrize("named", [False, True], ids=["that run", "that readers follow"])
def test_no_files_import_each_other_in_a_circle(named):
    assert not circle_of_files(named)


def test_ray_and_vllm_have_their_places():
    def has_its_place(name, top):
        if name == "doctor.import_probe":  # a program of its own
            return True
        if top == "ray":
            return name.split(".")[0] == "ray_backend"
        return name.startswith("rollout.vllm")

    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {target}"
        for name, file in MODULES.items()
        for target, line in imports(name, file)
        if (top := target.split(".")[0]) in ("ray", "vllm") and not has_its_place(name, top)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_devices_of_a_job_reach_for_ray():
    wrong = [
        f"{file.relative_to(ROOT)}:{line}"
        for name, file in MODULES.items()
        for target, line in imports(name, file)
        if target.startswith("hybridrl.ray_backend")
        and room_of(name) != "ray_backend"
        and name != "job.device_pool"
    ]
    assert not wrong, "\n".join(wrong)


def test_the_driver_side_needs_neither_ray_nor_vllm_nor_transformers():
    """The other rooms load transformers, which takes seconds; the fixture in conftest.py watches
    them while they are tested. Nor are they needed to find out that a setting is wrong."""
    rooms = ("system", "batch", "layout", "algorithms", "checks", "config", "controller")
    rooms += ("run_files", "console", "placement", "trainers", "run", "composition")
    names = ["hybridrl"] + [f"hybridrl.{name}" for name in MODULES if name.split(".")[0] in rooms]
    program = (
        "import hybridrl, importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    brought = {'ray', 'vllm', 'transformers'} & sys.modules.keys()\n"
        "    assert not brought, f'import {name} brings {brought}'\n"
        "    assert name != 'hybridrl' or 'torch' not in sys.modules, 'hybridrl brings torch'\n"
        "hybridrl.checks.check_list.check(hybridrl.load_config([]))\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT.parent
    )
    assert done.returncode == 0, done.stderr


def test_files_of_tests_have_names_of_their_own():
    """Of two files of one name, pytest refuses to collect both, as `make test-long` does."""
    names = [path.name for path in (ROOT.parent / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))
