"""A job over several nodes: on hosts of their own with a slow network between them, and side by
side on one machine."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from netlab import RAY_ENVIRONMENT, network, ray_nodes
from settings import LEARNS, SHORT

from hybridrl.planner.step.graph_replay import replay_graph
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.run_files.recorded_steps import read_recorded_steps

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
LEARNING = [*SHORT, *LEARNS, "warmup.steps=0", "trainer.steps=8", "num_devices=2"]
ENDLESS = [*SHORT, "trainer.steps=100000", "rollout=transformers", "num_devices=2"]


class Driver:
    """`python -m hybridrl.main` on the first of these nodes."""

    def __init__(self, nodes, folder: Path, *overrides: str, environment=None) -> None:
        self.folder = folder
        command = [sys.executable, "-m", "hybridrl.main", *overrides]
        if not any(o.startswith(("run.directory", "run.root")) for o in overrides):
            command.append(f"run.directory={folder / 'run'}")
        if nodes and not any(o.startswith("ray.address") for o in overrides):
            command.append(f"ray.address={nodes[0].cluster}")
        start = nodes[0].host.popen if nodes and nodes[0].host else subprocess.Popen
        self.process = start(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=folder,
            env={**os.environ, **RAY_ENVIRONMENT, **(environment or {})},
        )
        self._clock = threading.Timer(240, self.process.kill)
        self._clock.start()

    def wait_for_step(self, step: int) -> None:
        for line in self.process.stdout:
            if re.search(rf"step +{step}/", line):
                return
        raise AssertionError(f"step {step} never came")

    def finish(self) -> tuple[int, str]:
        """Exit code and the rest of the output."""
        rest = self.process.stdout.read()
        self._clock.cancel()
        return self.process.wait(), rest

    def rewards(self) -> list[float]:
        """Of each step of a run that ends well."""
        code, output = self.finish()
        assert code == 0, output
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        return [row["reward/mean"] for row in rows if "reward/mean" in row]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Rewards on this machine, without a cluster."""
    return Driver(None, tmp_path_factory.mktemp("alone"), *LEARNING).rewards()


@pytest.fixture(scope="module")
def hosts():
    with network(hosts=2, rate="400mbit") as made:
        yield made


@pytest.mark.long
@pytest.mark.vllm
def test_two_hosts_learn_what_one_does(alone, hosts, tmp_path):
    with ray_nodes(hosts, cpus=1) as nodes:
        assert Driver(nodes, tmp_path, *LEARNING).rewards() == alone
    assert alone[-1] > alone[0] + 0.3


@pytest.mark.long
@pytest.mark.vllm
def test_two_nodes_of_one_machine_learn_what_one_does(alone, tmp_path):
    with ray_nodes(nodes=2, cpus=1) as nodes:
        assert Driver(nodes, tmp_path, *LEARNING).rewards() == alone


@pytest.mark.parametrize("how", ["fail", pytest.param("disconnect", marks=pytest.mark.long)])
def test_a_lost_node_is_named(tmp_path, how):
    with network(hosts=2) as made, ray_nodes(made, cpus=1) as nodes:
        run = Driver(nodes, tmp_path, *ENDLESS)
        run.wait_for_step(3)
        getattr(made[1], how)()
        code, output = run.finish()
    assert code == 1
    (line,) = [line for line in output.splitlines() if "error:" in line]
    assert f"Node {made[1].address} (actor rank 1, reward rank 1) was lost during actor." in line
    assert "num_devices=1" in line and "Traceback" not in output


@pytest.mark.long
def test_a_node_with_another_version_is_named(hosts, tmp_path):
    other = tmp_path / "other"
    (other / "hybridrl").mkdir(parents=True)
    (other / "hybridrl" / "__init__.py").write_text("")
    (other / "hybridrl-9.9.9.dist-info").mkdir()
    text = "Metadata-Version: 2.1\nName: hybridrl\nVersion: 9.9.9\n"
    (other / "hybridrl-9.9.9.dist-info" / "METADATA").write_text(text)
    environments = [{}, {"PYTHONPATH": str(other)}]
    with ray_nodes(hosts, cpus=1, environments=environments) as nodes:
        code, output = Driver(nodes, tmp_path, *ENDLESS).finish()
    assert code == 2
    assert f"{hosts[1].address} has hybridrl 9.9.9" in output
    assert f"{hosts[0].address} has" not in output and "Traceback" not in output


def test_a_node_that_does_not_see_the_run_is_named(hosts, tmp_path):
    hosts[1].hides.append(tmp_path)
    try:
        with ray_nodes(hosts, cpus=1) as nodes:
            code, output = Driver(nodes, tmp_path, *ENDLESS).finish()
    finally:
        hosts[1].hides.clear()
    assert code == 2
    assert f"run.directory={tmp_path / 'run'} is not on {hosts[1].address}\n" in output
    assert "file system" in output and "Traceback" not in output


@pytest.mark.long
def test_a_clock_that_is_ahead_is_found(hosts, tmp_path):
    """Python on the second host lives half a second in the future; a replay of the run's steps does
    not."""
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nnow = time.time\ntime.time = lambda: now() + 0.5\n"
    )
    environments = [{}, {"PYTHONPATH": str(tmp_path)}]
    settings = [*SHORT, "trainer.steps=4", "rollout=transformers", "num_devices=2"]
    with ray_nodes(hosts, cpus=1, environments=environments) as nodes:
        Driver(nodes, tmp_path, *settings).rewards()
    steps = read_recorded_steps(tmp_path / "run")
    assert statistics.median(step.ahead[0] for step in steps) == pytest.approx(0.0, abs=5e-3)
    assert statistics.median(step.ahead[1] for step in steps) == pytest.approx(0.5, abs=5e-3)
    run = RecordedRun.at(tmp_path / "run")
    assert replay_graph(run.graph).makespan / len(run.steps) == pytest.approx(run.seconds, rel=0.03)
