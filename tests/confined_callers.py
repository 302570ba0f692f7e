"""Callers of the sandbox: processes that run programs at one level of confinement, as root or as an
ordinary user, and what shows whether anything is left of a program."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import psutil
import pytest
from tiers import few_of

import hybridrl
from hybridrl.sandbox.confined import landlock
from hybridrl.sandbox.python_runner import SandboxLimits, SandboxResult

NOBODY = 65534
SECRET = "a-secret-of-the-caller"
# Processor time ends what does not end by itself: wall time says how busy the machine is.
FAST = SandboxLimits(wall_s=60.0, cpu_s=3)
SOURCE = Path(hybridrl.__file__).parent
# An ordinary user may be unable to read this checkout, so the files are copied to where it can.
FILES = (
    "errors.py",
    "config/__init__.py",
    "config/setting.py",
    "rewards",
    "sandbox",
    "system/__init__.py",
    "system/memory_cgroup.py",
    "system/redaction.py",
)

CALLER = """
import dataclasses, json, sys
from hybridrl.sandbox import python_runner as sandbox
from hybridrl.rewards.code import passes_tests

level = sys.argv[1]
sandbox._try_confinement_levels = lambda: sandbox.SandboxConfinement(level, 0)
for line in sys.stdin:
    job = json.loads(line)
    limits = sandbox.SandboxLimits(**job.pop("limits"))
    try:
        if "tests" in job:
            answer = passes_tests("", job["source"], job["tests"], cpu_s=limits.cpu_s)
        else:
            answer = dataclasses.asdict(sandbox.run_python(**job, limits=limits))
    except Exception as error:
        answer = {"refused": repr(error)}
    print(json.dumps(answer), flush=True)
"""

# What most of the programs begin with.
PRELUDE = """
import ctypes, errno, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def expect_failure(what, action):
    try:
        result = action()
    except Exception as error:
        print(what, repr(error))
    else:
        print("ESCAPED", what, result)
def expect_errors(**calls):
    for what, result in calls.items():
        print("ESCAPED" if result != -1 else "refused", what, result)
"""


class Caller:
    """A process that runs programs at one level of confinement."""

    def __init__(self, folder: Path, level: str, user: int | None, python: str, **options) -> None:
        self.folder, self.level, self.user, self.python = folder, level, user, python
        self.process = subprocess.Popen(
            [python, "-c", CALLER, level],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
            env={
                **{"SECRET": SECRET, "PYTHONPATH": str(folder), "PATH": os.environ["PATH"]},
                "TMPDIR": str(folder / "scratch"),
            },
            **({} if user is None else {"user": user, "group": user, "extra_groups": []}),
            **options,
        )

    def ask(
        self, source: str, stdin: str = "", limits: SandboxLimits = FAST, bare: bool = False
    ) -> dict:
        source = textwrap.dedent(source)
        job = {
            "source": source if bare else PRELUDE + source,
            "stdin": stdin,
            "limits": dataclasses.asdict(limits),
        }
        self.send(job)
        return self.receive()

    def send(self, job: dict) -> None:
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def receive(self) -> dict:
        return json.loads(self.process.stdout.readline())

    def run(self, source: str, stdin: str = "", limits: SandboxLimits = FAST) -> SandboxResult:
        answer = self.ask(source, stdin, limits)
        assert "refused" not in answer, answer
        outcome = SandboxResult(**answer)
        assert "ESCAPED" not in outcome.stdout, outcome.stdout
        return outcome

    def run_well(self, source: str, stdin: str = "", limits: SandboxLimits = FAST) -> str:
        """Runs a program that has to end well, and gives what it printed."""
        outcome = self.run(source, stdin, limits)
        assert outcome.ended == "ok", outcome
        return outcome.stdout

    def score(self, program: str, tests: list) -> dict:
        """What the reward for code gives for it."""
        limits = dataclasses.asdict(FAST)
        self.send({"source": f"```python\n{program}\n```", "tests": tests, "limits": limits})
        return self.receive()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def pythons(user):
    """Interpreters that this user can start."""
    options = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    for python in (sys.executable, "/usr/local/bin/python3", "/usr/bin/python3"):
        check = "import sys, encodings, ctypes; sys.exit(sys.version_info < (3, 11))"
        try:
            done = subprocess.run([python, "-c", check], capture_output=True, cwd="/", **options)
        except OSError:
            continue
        if done.returncode == 0:
            yield python


def start(folder, kind):
    """A caller as `kind` says, or skips the test with the reason why there can be none here. A
    refusal where there can be one is a failure."""
    who, level, *home = kind.split("/")
    is_root = os.geteuid() == 0
    user = NOBODY if who == "ordinary" and is_root else None
    if missing := missing_for(who, level, user):
        pytest.skip(missing)
    # Without the right to mount, root's programs run as a user that nobody is.
    as_nobody = is_root and level != "root" and not home
    found = list(pythons(NOBODY if as_nobody else user))
    if not found:
        pytest.skip("no Python 3.11 that an ordinary user may read")
    if home:
        found = [_at_home(folder, found[0])]
    reasons = []
    for python in found:
        caller = Caller(folder, level, user, python)
        answer = caller.ask("")
        if "refused" not in answer:
            return caller
        caller.close()
        reasons.append(answer["refused"])
    return pytest.fail(f"{kind} should be had here: {reasons}")


def _at_home(folder, python):
    """An interpreter with its packages in a folder that only this user may enter."""
    home = folder / "home"
    if not home.exists():
        home.mkdir(mode=0o700)
        subprocess.run([python, "-m", "venv", "--without-pip", home / "venv"], check=True)
    return str(home / "venv/bin/python")


def missing_for(who, level, user):
    """What the machine does not give for this level; empty if it gives all that it needs."""
    if who == "root" and os.geteuid() != 0:
        return "the tests do not run as root"
    if level == "none":
        return "" if landlock.find_landlock_version() else "the kernel has no Landlock"
    flags = {"root": 0x20000, "user": 0x10000000}[level]  # CLONE_NEWNS, CLONE_NEWUSER
    code = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).unshare({flags}) != 0)"
    options = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    (python, *_) = [*pythons(user), sys.executable]
    tried = subprocess.run([python, "-c", code], cwd="/", **options)
    return "this user may not make namespaces" if tried.returncode else ""


KINDS = few_of(
    ("root/root", "root/user", "root/none", "ordinary/user", "ordinary/none", "root/none/home"),
    ("root/root", "ordinary/user"),
)
"""Who calls, with which namespaces; `home`: by an interpreter that only root may read."""


def traces(folder):
    """Processes of these callers' sandboxes, and scratch folders: of no others, which other tests
    may have at the same time."""
    processes = {
        f"process {process.pid}"
        for process in psutil.process_iter(["cmdline"])
        for command in [" ".join(process.info["cmdline"] or [])]
        if ("confined.supervisor" in command and str(folder) in command)
        or f"left-by-{folder.name}" in command
    }
    return processes | set(map(str, scratch_folders(folder)))


def scratch_folders(folder):
    return (folder / "scratch").glob("hybridrl-program-*")


def wait_for(condition, seconds=60.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)
    return condition()


@pytest.fixture(scope="module", name="folder")
def callers_folder():
    folder = Path(tempfile.mkdtemp(prefix="sandbox-test-"))
    folder.chmod(0o755)
    (folder / "scratch").mkdir()
    (folder / "scratch").chmod(0o1777)
    (folder / "hybridrl").mkdir()
    (folder / "hybridrl/__init__.py").touch()
    for name in FILES:
        (folder / "hybridrl" / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (SOURCE / name).is_dir() else shutil.copy
        copy(SOURCE / name, folder / "hybridrl" / name)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module", params=KINDS)
def shared_caller(folder, request):
    caller = start(folder, request.param)
    yield caller
    caller.close()


@pytest.fixture
def caller(shared_caller, folder):
    """The caller, alive before and after the test and with nothing left of the program."""
    before = traces(folder)
    yield shared_caller
    assert shared_caller.process.poll() is None, "the caller died"
    assert not psutil.Process(shared_caller.process.pid).children(recursive=True)
    assert wait_for(lambda: traces(folder) <= before), (before, traces(folder))
    assert shared_caller.ask("print(1)", bare=True)["stdout"] == "1\n"
