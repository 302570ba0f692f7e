"""What the command lines say of themselves, and what the page of a kept run is made of."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from golden.jobs import KEPT, flat

_MAIN, _TOOLS = ("-m", "hybridrl.main"), ("-m", "hybridrl.cli")
_COMMANDS = {
    "help-main": (*_MAIN, "--help"),
    "help-hybridrl": (*_TOOLS, "--help"),
    "settings-grpo": (*_MAIN, "--cfg", "job"),
    "settings-safe_rlhf": (*_MAIN, "--cfg", "job", "algorithm=safe_rlhf", "rollout=transformers"),
    "settings-calculator": (*_MAIN, "--cfg", "job", "data=calculator", "placement=separation"),
}
"""What is asked for beside the help of each command of `hybridrl`."""
REPORTS = ("grpo", "ppo", "sft")
_PART = re.compile(r'<script type="application/json" id="data-([^"]+)">(.*?)</script>', re.DOTALL)


def texts(folder: Path) -> dict[str, str]:
    """Return the helps of all commands, and the settings of some jobs, by name."""
    from hybridrl.cli import COMMANDS

    commands = dict(_COMMANDS)
    for name in COMMANDS:
        commands[f"help-{name}"] = (*_TOOLS, name, "--help")
    said = {name: _said(command, folder) for name, command in commands.items()}
    for action in sorted(re.search(r"\{(.*?)\}", said["help-checkpoint"])[1].split(",")):  # type: ignore[index]
        said[f"help-checkpoint-{action}"] = _said((*_TOOLS, "checkpoint", action, "--help"), folder)
    return said


def _said(command: tuple[str, ...], folder: Path) -> str:
    environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, cwd=folder, env=environment
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}: {done.stderr}"
    return re.sub(r"[ \t]+$", "", done.stdout, flags=re.MULTILINE)


def report_lines(name: str, folder: Path) -> dict[str, str]:
    """Return what the page of a kept run is made of, value by value."""
    shutil.copytree(KEPT / name, folder / name, dirs_exist_ok=True)
    _said((*_TOOLS, "report", name), folder)
    page = (folder / name / "report.html").read_text()
    return {
        line: value
        for part, text in _PART.findall(page)
        for line, value in flat(json.loads(text), part, 4)
        if line not in ("head, made", "head, folder")
    }
