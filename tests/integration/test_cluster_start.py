"""Starting on a cluster of two Ray nodes of different size, and what it says when it cannot."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import test_s3
from netlab import RAY_ENVIRONMENT, ray_nodes
from settings import SHORT

from hybridrl.errors import ConfigError
from hybridrl.ray_backend.connection import _join_or_start_cluster
from hybridrl.system.container_limits import count_usable_cores

pytestmark = [pytest.mark.ray, pytest.mark.slow]
QUIET = {"capture_output": True, "text": True, "timeout": 240, "check": False}
QUIET["env"] = {**os.environ, **RAY_ENVIRONMENT}
OVERRIDES = [*SHORT, "rollout=transformers", "trainer.steps=1"]


s3_server = test_s3.server


@pytest.fixture(scope="module")
def nodes():
    with ray_nodes(cpus=[1, 3], dashboard=True) as started:
        yield started


def run(
    script: str, *arguments: str, folder: Path | None = None, **environment: str
) -> tuple[int, str]:
    """A program of its own, because a process joins one Ray in its life."""
    settings = QUIET | {"env": QUIET["env"] | environment}
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=folder, **settings)
    return done.returncode, done.stdout + done.stderr


JOIN = """
import json, sys
from hybridrl.ray_backend.connection import ClusterConnection
from hybridrl.ray_backend.ray_executor import RayExecutor
connection = ClusterConnection(sys.argv[1])
with RayExecutor("cpu", 4, connection=connection, cpus_per_host=1) as first:
    print(json.dumps([device.node for device in first.cluster.devices]))
    try:
        RayExecutor("cpu", 2, start_timeout_s=1, cpus_per_host=1)
    except Exception as error:
        print(json.dumps(f"{type(error).__name__}: {error}"))
"""


@pytest.mark.more
def test_devices_of_a_node_are_neighbours_and_taken_ones_are_shown(nodes):
    code, output = run(JOIN, nodes[0].cluster)
    assert code == 0, output
    places, busy = (json.loads(line) for line in output.splitlines() if line[0] in '["')
    assert len(places) == 4 and sorted(places) == places
    assert sorted(places.count(node) for node in set(places)) == [1, 3]
    assert busy.startswith("ConfigError") and "ray.start_timeout_s" in busy
    assert f"{nodes[1].address}: 0 of 0 GPUs and 0 of 3 CPUs free" in busy


MAIN = "from hybridrl.main import main; main()"


def test_a_cluster_that_is_too_small(nodes, tmp_path):
    address = f"ray.address={nodes[0].cluster}"
    code, output = run(MAIN, address, *OVERRIDES, "num_devices=9", folder=tmp_path)
    assert code == 2 and "num_devices=9" in output and "Traceback" not in output
    assert f"{nodes[1].address}: 0 of 0 GPUs and 3 of 3 CPUs free" in output


@pytest.mark.more
def test_an_address_at_which_nothing_answers(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    code, output = run(MAIN, f"ray.address=127.0.0.1:{port}", *OVERRIDES, folder=tmp_path)
    assert code == 2 and f"ray.address=127.0.0.1:{port}: nothing answers there" in output


@pytest.mark.more
@pytest.mark.skipif(not find_spec("moto"), reason="moto is not installed")
def test_a_bucket_that_workers_have_no_credentials_for(nodes, s3_server, tmp_path):
    """The driver has them, and has written there before workers are asked."""
    settings = [f"ray.address={nodes[0].cluster}", f"checkpoint.folder={s3_server.bucket}/mine"]
    settings += ["checkpoint.every=1", "num_devices=4"]
    code, output = run(MAIN, *settings, *OVERRIDES, folder=tmp_path, **os.environ)
    assert code == 2 and "Traceback" not in output, output
    assert output.count(f"checkpoint.folder={s3_server.bucket}/mine on ") == 2, output
    assert "They have the environment of `ray start` on their node" in output


OWN = """
from hybridrl.ray_backend.connection import _join_or_start_cluster, stop_local_cluster
from hybridrl.ray_backend.ray_import import ray
node = _join_or_start_cluster(None)
print("cpus", ray.cluster_resources()["CPU"], "at", node.logs)
stop_local_cluster(node)
"""


HANDLING = """
import os, signal, sys
from hybridrl.ray_backend.connection import ClusterConnection
signal.signal(signal.SIGTERM, lambda *_: print("handled"))
ClusterConnection(sys.argv[1]).close()
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("address", ["joined", pytest.param("local", marks=pytest.mark.more)])
def test_sigterm_is_still_handled_when_ray_has_ended(nodes, address):
    code, output = run(HANDLING, nodes[0].cluster if address == "joined" else address)
    assert code == 0 and "handled" in output, output


@pytest.mark.more
def test_a_ray_of_somebody_else_is_left_alone(nodes):
    """Ray itself joins what the last `ray start` wrote to this file, whether that lives or not."""
    folder = Path(tempfile.mkdtemp(prefix="hy", dir="/tmp"))  # short, for sockets
    try:
        (folder / "ray").mkdir()
        (folder / "ray" / "ray_current_cluster").write_text(nodes[0].cluster)
        code, output = run(OWN, RAY_TMPDIR=str(folder))
        left = [path.name for path in (folder / "ray").glob("session_2*")]
    finally:
        shutil.rmtree(folder)
    assert code == 0 and f"at {folder}/ray/session_" in output, output
    assert float(output.split("cpus ")[1].split()[0]) == count_usable_cores() and not left


@pytest.mark.more
def test_the_script_that_waits_for_all_nodes(nodes):
    wait = [sys.executable, str(Path(__file__).parents[2] / "docker" / "wait_for_nodes.py")]
    done = subprocess.run([*wait, nodes[0].cluster, "2"], **QUIET)
    assert done.returncode == 0, done.stderr


@pytest.mark.more
def test_a_temporary_folder_of_a_long_name(tmp_path):
    long = tmp_path / ("scratch-of-job-" + "4711" * 25)
    long.mkdir()
    code, output = run(OWN, TMPDIR=str(long))
    assert code == 0 and "at /tmp/ray/session_" in output, output
    assert not Path(output.split("at ")[1].split()[0]).exists()


@pytest.mark.more
def test_an_address_of_the_environment_is_called_by_its_name(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for address in (None, "auto"):
        with pytest.raises(ConfigError, match=r"RAY_ADDRESS=127.0.0.1:1 \(an envi"):
            _join_or_start_cluster(address)
    with pytest.raises(ConfigError, match=r"ray.address=127.0.0.1:2: nothing answers there"):
        _join_or_start_cluster("127.0.0.1:2")


@pytest.mark.long
def test_a_submitted_job(nodes, tmp_path):
    ray = str(Path(sys.executable).with_name("ray"))
    address = f"--address=http://127.0.0.1:{nodes[0].dashboard}"
    # Without waiting: on a busy machine the command may lose the log and return too early.
    command = [ray, "job", "submit", address, "--no-wait", "--"]
    command += [sys.executable, "-m", "hybridrl.main", "ray.address=auto", *OVERRIDES]
    command.append(f"run.directory={tmp_path / 'run'}")
    summary = tmp_path / "run" / "summary.json"
    deadline = time.monotonic() + 200
    while (submitted := subprocess.run(command, **QUIET)).returncode:
        # Ray's agents start after its head.
        assert "No available agent" in submitted.stderr, submitted.stderr
        assert time.monotonic() < deadline
        time.sleep(2)
    while not summary.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert summary.exists(), subprocess.run([ray, "job", "list", address], **QUIET).stdout
    assert json.loads(summary.read_text())["steps"] == 1
