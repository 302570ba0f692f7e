"""The script for Slurm as it is shipped, under commands that answer as Slurm's and Ray's do."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from settings import SHORT

from hybridrl.checkpoint.store import CheckpointStore

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.more,
    pytest.mark.skipif(not shutil.which("bash"), reason="bash"),
]
SRUN = """#!/bin/bash
while [[ $1 == -* ]]; do [[ $1 == -w ]] && shift; shift; done
"$@" & task=$!
trap 'kill -TERM $task' TERM  # as srun passes signals on, but not to the tasks of other sruns
wait $task; code=$?
while kill -0 $task 2>/dev/null; do wait $task; code=$?; done
exit $code
"""
SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then printf 'one\\ntwo\\n'; else echo "$*" >> "$WORK/scontrol.log"; fi
"""
RAY = """#!/bin/bash
echo "$*" >> "$WORK/ray.log"
trap 'echo told >> "$WORK/ray.log"; exit' TERM
while sleep 0.2; do [[ -e $WORK/over ]] && exit; done
"""
PYTHON = """#!/bin/bash
arguments=()
for word in "$@"; do case $word in
    ray.address=*) echo "$word" >> "$WORK/driver.log"; arguments+=(executor=inline devices=cpu) ;;
    devices=cuda) ;;
    *) arguments+=("$word") ;;
esac; done
exec PROGRAM "${arguments[@]}"
"""


@pytest.fixture
def sbatch(tmp_path):
    """Runs the script in a home of its own, with commands of this test before all others."""
    (commands := tmp_path / "bin").mkdir()
    programs = {"srun": SRUN, "scontrol": SCONTROL, "ray": RAY}
    programs |= {"python": PYTHON.replace("PROGRAM", sys.executable)}
    for name, text in programs.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    (home := tmp_path / "home").mkdir()
    (home / ".venv" / "bin").mkdir(parents=True)
    (home / ".venv" / "bin" / "activate").write_text("")
    (home / "docker").mkdir()
    shutil.copy(ROOT / "docker" / "slurm.sbatch", home / "docker")
    (home / "docker" / "wait_for_nodes.py").write_text("import sys; print(*sys.argv[1:])")
    slurm = {"JOB_ID": 7, "JOB_NODELIST": "node[1-2]", "GPUS_PER_NODE": "h100:8"}
    slurm |= {"CPUS_PER_TASK": 4, "SUBMIT_DIR": home}
    environment = os.environ | {f"SLURM_{name}": str(value) for name, value in slurm.items()}
    environment |= {"WORK": str(tmp_path), "PYTHONPATH": str(ROOT)}
    environment["PATH"] = f"{commands}{os.pathsep}{environment['PATH']}"
    environment.pop("HYBRIDRL_HOME", None)
    started = []

    def start(*overrides):
        output = (tmp_path / "job.log").open("a")
        command = ["bash", str(home / "docker" / "slurm.sbatch"), *overrides]
        with output:
            started.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
            )
        return started[-1]

    start.home = home
    yield start
    (tmp_path / "over").touch()
    for process in started:
        process.kill()
        process.wait()
    for child in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if child.environ().get("WORK") == str(tmp_path):
                child.kill()


def test_a_warning_is_a_checkpoint_and_a_requeue_and_the_same_command_goes_on(sbatch, tmp_path):
    own = [*SHORT, "rollout=transformers", "run.directory=run", "resume=auto", "eval.every=0"]
    own += ["checkpoint.every=1000", "observe.show_every=0"]
    steps = sbatch.home / "run" / "metrics.jsonl"

    job = sbatch(*own, "trainer.steps=1000")
    until = time.monotonic() + 120
    while not (steps.exists() and '"step": 2' in steps.read_text()):
        assert job.poll() is None and time.monotonic() < until, (tmp_path / "job.log").read_text()
        time.sleep(0.2)
    job.send_signal(signal.SIGTERM)  # as `--signal=B:TERM@120` does
    said = (tmp_path / "job.log").read_text
    assert job.wait(60) == 75, said()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    saved = CheckpointStore(sbatch.home / "run" / "checkpoints").steps()[-1]
    assert saved >= 2

    again = sbatch(*own, f"trainer.steps={saved + 1}")
    assert again.wait(120) == 0, said()
    assert (tmp_path / "scontrol.log").read_text() == "requeue 7\n"
    assert f"after step {saved}" in said()
    numbers = [json.loads(row).get("step") for row in steps.read_text().splitlines()]
    assert numbers[-1] == saved + 1

    rays = (tmp_path / "ray.log").read_text().splitlines()
    assert "told" not in rays  # they have to live until the driver has saved
    heads = [words for words in rays if words.startswith("start --head")]
    assert len(heads) == 2 and all("--num-gpus=8 --num-cpus=4" in words for words in rays)
    address = heads[0].split("--node-ip-address=")[1].split()[0]
    assert f"ray.address={address}:20007" in (tmp_path / "driver.log").read_text()
