"""What is imported from vLLM, and called of it, is there as it is called: in the installed package,
and (`make test-long`) in the CUDA wheels of the lowest and the highest version that pyproject.toml
takes. Its Python is read, never imported."""

import ast
import importlib.util
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from package_trees import PACKAGE, calls_of, keywords_of, nodes_of, tree_of

from hybridrl.models.flash_attention import FLASH_4

pytestmark = pytest.mark.more
REPOSITORY = Path(__file__).parents[2]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


class Package:
    """A tree of Python files, by the names of modules."""

    def __init__(self, folder):
        self.folder, self.trees = folder, {}

    def module(self, name):
        """The tree of a module, and whether it is a package; None if there is none."""
        path = self.folder.joinpath(*name.split("."))
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                if file not in self.trees:
                    self.trees[file] = ast.parse(file.read_text())
                return self.trees[file], file.name == "__init__.py"
        return None

    def find(self, module, name, depth=0):
        """What a name of a module is: the node that defines it, wherever it was imported from, or
        True for a module or a package of others; None if it is not there."""
        if (found := self.module(module)) is None:
            return None
        tree, is_package = found
        for node in top_level(tree):
            if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name and depth < 8:
                        up = node.level - is_package
                        parts = module.split(".")[: -up or None] if node.level else []
                        source = ".".join([*parts, *filter(None, [node.module])])
                        is_ours = source.split(".")[0] == module.split(".")[0]
                        return self.find(source, alias.name, depth + 1) if is_ours else True
            if name in names_set(node):
                return node
        return True if self.module(f"{module}.{name}") else None

    def method(self, module, of_class, name):
        """A method of a class or of the classes that it is made from; None if one of these is not
        vLLM's, True if it is none of them."""
        for node in of_class.body:
            if isinstance(node, FUNCTIONS) and node.name == name:
                return node
        for base in of_class.bases:
            parent = self.find(module, ast.unparse(base).split(".")[-1])
            found = self.method(module, parent, name) if isinstance(parent, ast.ClassDef) else None
            if found is not True:
                return found
        return True


def top_level(node):
    """The statements of a module that are in no function and no class."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from top_level(child)


def names_set(node):
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


def parameters(function):
    given = function.args
    return {argument.arg for argument in (*given.posonlyargs, *given.args, *given.kwonlyargs)}


def fields(of_class):
    return {node.target.id for node in of_class.body if isinstance(node, ast.AnnAssign)}


def supported_versions():
    """The requirement of vLLM on GPUs, and what asks for its lowest version."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    (wanted,) = [x for x in project["optional-dependencies"]["gpu"] if x.startswith("vllm")]
    return {"lowest": f"vllm=={re.search('>= *([0-9.]+)', wanted)[1]}", "highest": wanted}


@pytest.fixture(
    scope="module",
    params=["installed", *(pytest.param(x, marks=pytest.mark.long) for x in ("lowest", "highest"))],
)
def vllm(request, tmp_path_factory):
    if request.param == "installed":
        if (spec := importlib.util.find_spec("vllm")) is None:
            pytest.skip("vLLM is not installed")
        return Package(Path(spec.origin).parents[1])
    folder = tmp_path_factory.mktemp(request.param)
    wanted = supported_versions()[request.param]
    platform = [f"--platform=manylinux_2_{glibc}_x86_64" for glibc in (28, 31, 34, 35)]
    platform.append("--python-version=3.12")
    download = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run(
        [*download, *platform, "--dest", folder, wanted], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"pip finds no wheel of {wanted}: {done.stderr.strip()[-300:]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [x for x in archive.namelist() if x.endswith(".py")])
    wheel.unlink()
    return Package(folder)


def vllm_imports():
    """Each file of ours with each name that it imports from vLLM: module, name, name there."""
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = tree_of(path)
        for node in nodes_of(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                for alias in node.names:
                    yield path.relative_to(PACKAGE), tree, node.module, alias


def test_every_imported_name_is_there(vllm):
    imports = list(vllm_imports())
    assert len(imports) > 30
    missing = [
        f"{path}: {module}.{alias.name}"
        for path, _, module, alias in imports
        if vllm.find(module, alias.name) is None
    ]
    assert not missing, missing


def misfit(call, function, is_method):
    """Why a function cannot be called so, in words; None if it can."""
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)][is_method:]
    if not given.kwarg and (unknown := keywords_of(call) - parameters(function)):
        return f"has no {sorted(unknown)}"
    if any(isinstance(x, ast.Starred) for x in call.args) or None in {w.arg for w in call.keywords}:
        return None
    if not given.vararg and len(call.args) > len(positional):
        return f"takes {len(positional)} in order, not {len(call.args)}"
    needed = set(positional[len(call.args) : len(positional) - len(given.defaults)])
    needed |= {
        argument.arg
        for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)
        if default is None
    }
    return f"needs {sorted(needed - keywords_of(call))}" if needed - keywords_of(call) else None


def test_every_imported_function_and_class_is_called_as_it_is(vllm):
    seen, wrong = set(), []
    for path, tree, module, alias in vllm_imports():
        found = vllm.find(module, alias.name)
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != (
                alias.asname or alias.name
            ):
                continue
            function, is_method = found, False
            if isinstance(found, ast.ClassDef):
                function, is_method = vllm.method(module, found, "__init__"), True
            if isinstance(function, FUNCTIONS):
                seen.add(alias.name)
                if why := misfit(node, function, is_method):
                    wrong.append(f"{path}: {alias.name} {why}")
    assert len(seen) > 4 and not wrong, (seen, wrong)


def test_methods_of_ours_take_what_those_in_their_place_take(vllm):
    """Those of classes that are made from vLLM's."""
    seen, wrong = set(), []
    for path, tree, module, alias in vllm_imports():
        parent = vllm.find(module, alias.name)
        if not isinstance(parent, ast.ClassDef):
            continue
        name = alias.asname or alias.name
        for ours in ast.walk(tree):
            if not isinstance(ours, ast.ClassDef) or name not in map(ast.unparse, ours.bases):
                continue
            for method in filter(lambda node: isinstance(node, FUNCTIONS), ours.body):
                theirs = vllm.method(module, parent, method.name)
                if not isinstance(theirs, FUNCTIONS) or method.name == "__init__":
                    continue
                seen.add(f"{ours.name}.{method.name}")
                takes = method.args
                lacks = {x.arg for x in theirs.args.args} - parameters(method)
                fewer = len(takes.posonlyargs + takes.args) < len(theirs.args.args)
                if lacks and not takes.kwarg and (fewer and not takes.vararg):
                    wrong.append(f"{path}: {ours.name}.{method.name} lacks {sorted(lacks)}")
    assert len(seen) > 4 and not wrong, (seen, wrong)


def test_the_engine_is_given_what_vllm_takes(vllm):
    llm = vllm.find("vllm.entrypoints.llm", "LLM")
    known = parameters(vllm.method("vllm.entrypoints.llm", llm, "__init__"))
    known |= fields(vllm.find("vllm.engine.arg_utils", "EngineArgs"))
    (call,) = calls_of("rollout/vllm_startup.py", "LLM")
    given = keywords_of(call)
    for node in nodes_of(PACKAGE / "rollout/vllm_startup.py"):  # and by device
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Dict):
            given |= {key.value for key in node.value.keys if key is not None}
    assert "enable_sleep_mode" in given
    assert given <= known, sorted(given - known)


def test_sampling_is_asked_for_as_vllm_has_it(vllm):
    known = fields(vllm.find("vllm.sampling_params", "SamplingParams"))
    for call in calls_of("rollout/vllm_engine.py", "SamplingParams"):
        assert keywords_of(call) <= known, sorted(keywords_of(call) - known)


def test_sleeping_and_waking_is_as_vllm_has_it(vllm):
    llm = vllm.find("vllm.entrypoints.llm", "LLM")
    for name in ("sleep", "wake_up", "reset_prefix_cache"):
        takes = parameters(vllm.method("vllm.entrypoints.llm", llm, name))
        for call in calls_of("rollout/vllm_engine.py", name):
            if ast.unparse(call.func).startswith("self._llm."):
                assert keywords_of(call) <= takes, name
    worker = vllm.find("vllm.v1.worker.gpu_worker", "Worker")
    assert "level" in parameters(vllm.method("vllm.v1.worker.gpu_worker", worker, "sleep"))
    assert "tags" in parameters(vllm.method("vllm.v1.worker.gpu_worker", worker, "wake_up"))
    tags = {
        tag.value
        for call in calls_of("rollout/vllm_engine.py", "wake_up")
        for word in call.keywords
        for tag in getattr(word.value, "elts", ())
    }
    core = vllm.find("vllm.v1.engine.core", "EngineCore")
    text = "".join(map(ast.unparse, (worker, llm, core)))
    assert tags == {"weights", "kv_cache"} and all(f"'{tag}'" in text for tag in tags)


def test_hits_of_the_prefix_cache_are_recorded_as_vllm_does_it(vllm):
    module = "vllm.v1.core.kv_cache_manager"
    method = vllm.method(module, vllm.find(module, "KVCacheManager"), "record_prefix_cache_stats")
    assert parameters(method) == {"self", "request", "num_hits"}
    scheduler = ast.unparse(vllm.find("vllm.v1.core.sched.scheduler", "Scheduler"))
    (given,) = re.findall(r"record_prefix_cache_stats\((.*?)\)", scheduler)
    assert len(given.split(",")) == 2


def test_the_external_launcher_still_asks_where_to_meet(vllm):
    module = "vllm.v1.executor.uniproc_executor"
    launcher = vllm.find(module, "ExecutorWithExternalLauncher")
    asked = vllm.method(module, launcher, "_distributed_args")
    assert parameters(asked) == {"self"}
    (answer,) = [node for node in ast.walk(asked) if isinstance(node, ast.Return)]
    assert len(answer.value.elts) == 3
    parent = ast.unparse(vllm.find(module, "UniProcExecutor"))
    assert "self._distributed_args()" in parent and "driver_worker" in parent


def test_the_process_groups_of_vllm_are_variables_of_a_module(vllm):
    tree, _ = vllm.module("vllm.distributed.parallel_state")
    named = {
        node.target.id: ast.unparse(node.annotation)
        for node in tree.body
        if isinstance(node, ast.AnnAssign)
    }
    groups = {name for name, kind in named.items() if "GroupCoordinator" in kind}
    assert {"_WORLD", "_TP", "_PP", "_DP", "_EP"} <= groups
    assert "_NODE_COUNT" in named


def test_flash_attention_4_of_the_wheel_takes_what_torch_gives_it(vllm):
    """`models/flash_attention.py` drops the results that torch does not unpack."""
    if vllm.module(FLASH_4) is None:
        pytest.skip("only CUDA wheels have it")
    spec = importlib.util.find_spec("torch.nn.attention._fa4")
    hook = ast.parse(Path(spec.origin).read_text())
    for name, results in (("_flash_attn_fwd", 2), ("_flash_attn_bwd", 3)):
        function = vllm.find(FLASH_4, name)
        given = {
            word
            for node in ast.walk(hook)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == f"module.{name}"
            for word in keywords_of(node)
        }
        if name == "_flash_attn_fwd":  # by a dictionary
            given |= {
                key.value
                for node in ast.walk(hook)
                if isinstance(node, ast.Dict)
                for key in node.keys
                if isinstance(key, ast.Constant)
            }
        assert "softmax_scale" in given and given <= parameters(function), given
        found = [node.value for node in ast.walk(function) if isinstance(node, ast.Return)]
        found += [part for x in found if isinstance(x, ast.IfExp) for part in (x.body, x.orelse)]
        counts = {len(x.elts) for x in found if isinstance(x, ast.Tuple)}
        assert counts and min(counts) >= results
