"""A driver that Ray ends, because the raylet beneath it has gone: somebody says so."""

import re
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.more, pytest.mark.ray, pytest.mark.slow]
DRIVER = """
import threading
from hybridrl.ray_backend.own_node import RAYLET_PROCESS, LocalRayNode

node = LocalRayNode()
import numpy as np
import psutil
import ray

ray.init(num_cpus=1, include_dashboard=False, logging_level="error")
node.started(ray._private.worker.global_worker.node.get_session_dir_path())
(raylet,) = (child for child in psutil.Process().children() if child.name() == RAYLET_PROCESS)
print(raylet.pid, flush=True)
threading.Timer(0.5, raylet.kill).start()
while True:
    ray.put(np.zeros(200_000))
"""


def test_the_raylets_end_in_the_middle_of_a_call_is_told(tmp_path):
    command = [sys.executable, "-c", DRIVER]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and "Traceback" not in done.stderr
    (error,) = re.findall("^error: .*$", done.stderr, re.MULTILINE)
    assert re.search(rf"Ray's raylet \(.*process {done.stdout.strip()}\) ended", error)
    assert "Ray has ended the driver with it. Where there is a checkpoint," in error
