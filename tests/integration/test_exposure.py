"""What a job on this machine opens to the network, and to other users."""

import ipaddress
import json
import os
import resource
import socket
import sys

import httpx
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


TEXT = "zq7Xv9-Kw3Text"
LEAKING = """
def score(response, api_key, step=[0]):
    step[0] += 1
    if step[0] > 9:
        raise ValueError(f"the service said: {api_key} is unknown")
    print("asked with", api_key)
    return float(len(response))
"""


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.ray
@pytest.mark.parametrize("fault", ["a step fails", "the engine does not start"])
def test_no_line_and_no_file_of_a_job_shows_a_secret(tmp_path, fault):
    """vLLM prints the options that it was given, and a user's function what it likes."""
    (tmp_path / "code.py").write_text(LEAKING)
    settings = [
        *("rollout=vllm", "num_devices=1", "trainer.steps=4", "warmup.steps=0", "eval.every=0"),
        *("reward.function=code.py:score", "reward.options.score.api_key=${oc.env:PLAIN}"),
        *("reward.on_error=fail", f"rollout.engine_options.hf_token={TEXT}"),
        *(
            ["rollout.engine_options.max_num_batched_tokens=1"]
            if fault.startswith("the engine")
            else []
        ),
    ]
    job = Victim(tmp_path, *SHORT, *settings, environment={"PLAIN": TEXT, "API_TOKEN": TEXT})
    assert job.finish() == 1, job.output
    wanted = "the service said: ***" if fault == "a step fails" else "vLLM does not start"
    assert wanted in job.output
    written = [file for file in job.run.rglob("*") if file.is_file()]
    assert {"config.yaml", "status.json"} <= {file.name for file in written}
    assert TEXT not in job.output
    assert [file for file in written if TEXT.encode() in file.read_bytes()] == []


AGENT = """
import json, os, sys
from openai import OpenAI
row = json.load(sys.stdin)
messages = [{"role": "user", "content": row["prompt"]}]
answer = OpenAI().chat.completions.create(model="policy", messages=messages)
print(float(len(answer.choices[0].message.content or "")))
"""


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.ray
def test_idle_connections_stop_neither_a_job_nor_its_health(tmp_path):
    """1,200 clients without a token, which say nothing more than the beginning of a request."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    (tmp_path / "agent.py").write_text(AGENT)
    rows = [{"prompt": f"{n} + 1 =", "answer": str(n + 1)} for n in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *("rollout=vllm", "num_devices=1", "trainer.steps=10000", "warmup.steps=0", "eval.every=0"),
        *("data=jsonl", "data.path=rows.jsonl", "environment.name=command", "rollout.serve=true"),
        *(f"environment.options.command=[{sys.executable}, agent.py]", "model.tiny.context=256"),
        *("data.prompts_per_step=2", "rollout.samples_per_prompt=2", "rollout.max_tokens=8"),
        "data.max_prompt_tokens=64",
    ]
    job = Victim(tmp_path, *SHORT, *settings)
    idle: list[socket.socket] = []
    try:
        assert job.wait_for_step(1), job.output
        where = json.loads((job.run / "endpoint-0.json").read_text())
        address = httpx.URL(where["url"])
        for _ in range(1200):
            idle.append(socket.create_connection((address.host, address.port), timeout=60))
            idle[-1].sendall(b"GET /health HTTP/1.1\r\nX: ")
        for _ in range(20):
            assert httpx.get(f"{where['url']}/health", timeout=60).status_code == 200
        done = len(job.rows())
        assert job.wait_for_step(done + 2), job.output
    finally:
        for connection in idle:
            connection.close()
        job.process.terminate()
        job.finish()
    assert "takes no connections" not in job.output and "failed" not in job.output
