"""Who may import whom, and that nothing brings Ray or vLLM along unasked."""

import ast
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import hybridrl

ROOT = Path(hybridrl.__file__).parent
EVERYBODY = {"errors", "core.redaction", "config.schema", "config.role_models", "config.resume"}
EVERYBODY |= {"config.resumed_settings", "config.eval_sets", "config.changed"}
EVERYTHING = {"*"}
# A room is a package directly under hybridrl. It may import itself, `EVERYBODY`, and what stands
# here: a room with all that is in it, or `=` and one module.
MAY_IMPORT = {
    "core": set(),
    "algorithms": {"core"},
    "conversations": set(),
    "data": {"core", "conversations", "environments", "=rewards.procedural"},
    "rewards": {"core"},
    "observe": {"core"},
    "models": {"core", "checkpoint", "compress"},
    "controller": {"core", "observe"},
    "ray_backend": {"core", "controller"},
    "placement": {"core", "controller"},
    "reshard": {"core", "compress"},
    "checkpoint": {"core"},
    "compress": {"core"},
    "parallel": {"core", "compress", "models", "=controller", "=controller.worker"},
    "rollout": {"core", "models"},
    "environments": {"core"},
    "serving": {"core", "conversations", "environments", "rollout"},
    "engine": {
        *("core", "algorithms", "checkpoint", "compress", "models", "parallel", "reshard"),
        "rollout",
    },
    "workers": {
        *("core", "algorithms", "models", "parallel", "engine", "rollout", "rewards", "data"),
        *("controller", "checkpoint", "compress", "conversations", "environments", "serving"),
    },
    "evaluation": {
        *("core", "controller", "conversations", "data", "observe", "rewards"),
        *("=rollout", "=rollout.base", "=config.bounds"),
    },
    "trainers": {
        *("core", "algorithms", "controller", "data", "evaluation", "observe"),
        *("=rollout", "=rollout.base", "=rewards", "=config.load"),
    },
    "config": {"=core", "=core.locations"},
    "checks": {
        *("core", "algorithms", "models", "parallel", "placement", "rewards", "trainers"),
        *("evaluation", "=rollout.episode_class", "=rollout.vllm_options", "=config.values"),
        *("conversations", "=environments.names"),
        *("=data.samplers", "=data.mixture"),
    },
    "planner": {
        *("core", "controller", "models", "placement", "trainers"),
        *("=rollout", "=checks.placement", "=compress", "=compress.gradient_choice"),
        *("=compress.weights", "=config.load", "=config.presets"),
        *("=observe.recorded_steps", "=observe.metrics_history", "=parallel.process_group"),
    },
    "report": {
        *("core", "observe", "placement", "planner"),
        *("=config.load", "=config.presets", "=config.values"),
    },
    # Modules beside the rooms: they put the others together.
    "": EVERYTHING,
    "main": EVERYTHING,
    "cli": EVERYTHING,
    "devices": EVERYTHING,
    "groups": EVERYTHING,
    "interrupts": EVERYTHING,
    "commands": {
        *("core", "checkpoint", "doctor", "models", "observe", "planner", "report", "trainers"),
        *("=config.overrides", "=config.values", "=config.load", "=checks.settings"),
        *("=checks.precision", "=cli", "=config.names", "=config.presets", "=config.task_settings"),
        *("=inputs", "=preflight"),
        *("=rollout.base", "=rollout.choosing", "=rollout.pipeline_group"),
    },
    "doctor": {"core", "=checks.open_files", "=observe.storage", "=observe.summary"},
    "job": EVERYTHING,
    "inputs": EVERYTHING,
    "preflight": EVERYTHING,
    "roles": EVERYTHING,
    "errors": set(),
}


def module_name(file):
    """`core.batch` for core/batch.py, `core` for core/__init__.py, `` for hybridrl itself."""
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(ROOT.rglob("*.py"))}


def imports(name, file, named=False):
    """Every module that `file` imports when it runs, with the line, as a full dotted name.

    What stands under `if TYPE_CHECKING:` is for readers and type checkers only.

    Args:
        named: That too.
    """
    package = ["hybridrl", *name.split(".")] if name else ["hybridrl"]
    package = package if file.name == "__init__.py" else package[:-1]
    nodes = [ast.parse(file.read_text())]
    while nodes:
        node = nodes.pop()
        for_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if for_types and not named:
            nodes.extend(node.orelse)
            continue
        nodes.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                is_module = inner.removeprefix("hybridrl.") in MODULES
                yield (inner if is_module else base), node.lineno


def allowed(name, target):
    room, other = name.split(".")[0], target.split(".")[0]
    rules = MAY_IMPORT[room]
    return room == other or target in EVERYBODY or bool({"*", other, f"={target}"} & rules)


def test_rooms_import_only_what_they_may():
    rooms = {name.split(".")[0] for name in MODULES}
    assert rooms <= MAY_IMPORT.keys(), f"give {rooms - MAY_IMPORT.keys()} a line in MAY_IMPORT"
    wrong = [
        f"{file.relative_to(ROOT)}:{line} imports {target}"
        for name, file in MODULES.items()
        for target, line in imports(name, file)
        if target.startswith("hybridrl.") and not allowed(name, target.removeprefix("hybridrl."))
    ]
    assert not wrong, "\n".join(wrong)


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
        if name == "doctor.import_trial":  # a program of its own
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
        and name.split(".")[0] not in ("ray_backend", "devices")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_driver_side_needs_neither_ray_nor_vllm_nor_transformers():
    """The other rooms load transformers, which takes seconds; the fixture in conftest.py watches
    them while they are tested. Nor are they needed to find out that a setting is wrong."""
    rooms = ("core", "algorithms", "checks", "config", "controller", "observe")
    rooms += ("placement", "trainers")
    names = ["hybridrl"] + [f"hybridrl.{name}" for name in MODULES if name.split(".")[0] in rooms]
    program = (
        "import hybridrl, importlib, sys\n"
        f"for name in {names}:\n"
        "    importlib.import_module(name)\n"
        "    brought = {'ray', 'vllm', 'transformers'} & sys.modules.keys()\n"
        "    assert not brought, f'import {name} brings {brought}'\n"
        "    assert name != 'hybridrl' or 'torch' not in sys.modules, 'hybridrl brings torch'\n"
        "hybridrl.checks.settings.check(hybridrl.load_config([]))\n"
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
