"""What a job on this machine opens to the network, and to other users."""

import ipaddress
import os

import psutil
import pytest
from settings import SHORT
from victims import Victim

pytestmark = pytest.mark.more


def open_ports(processes):
    """The addresses at which these processes listen."""
    own = {process.pid for process in processes}
    return [
        (psutil.Process(found.pid).name(), found.laddr.ip, found.laddr.port)
        for found in psutil.net_connections(kind="inet")
        if found.pid in own and found.status == psutil.CONN_LISTEN
    ]


def is_loopback(address):
    found = ipaddress.ip_address(address)
    return (getattr(found, "ipv4_mapped", None) or found).is_loopback


@pytest.mark.ray
@pytest.mark.skipif(os.geteuid() != 0, reason="others' sockets are shown to root only")
def test_every_port_of_a_job_is_on_loopback(tmp_path):
    settings = ["rollout=transformers", "trainer.steps=500", "run.private=true", "num_devices=2"]
    victim = Victim(tmp_path, *SHORT, *settings)
    try:
        assert victim.wait_for_step(1), victim.output
        ports = open_ports(victim.processes())
    finally:
        victim.process.terminate()
        victim.finish()
    assert victim.left_after(30) == []
    assert {name for name, *_ in ports} >= {"gcs_server", "raylet"}
    assert [port for port in ports if not is_loopback(port[1])] == []
    assert victim.run.stat().st_mode & 0o077 == 0
    others = [file for file in victim.run.rglob("*") if file.lstat().st_mode & 0o077]
    assert [file for file in others if file.is_file() and not file.is_symlink()] == []
