"""Checkpoints in a bucket of a real S3 server, which goes away and comes back."""

import importlib.util
import json
import re
import socket

import pytest
from test_resume_ray import SLOW_REWARD

from hybridrl.checkpoint.store import CheckpointStore
from hybridrl.cli import main
from hybridrl.console.console_choice import make_console
from hybridrl.errors import StorageError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.run import loop
from hybridrl.system.locations import list_file_sizes, parse_location

pytestmark = [
    pytest.mark.more,
    pytest.mark.usefixtures("process_group"),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("moto", "s3fs", "flask")),
        reason="moto, flask and s3fs are not installed",
    ),
]
SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    "model.tiny={hidden_size: 32, layers: 1, heads: 1}",
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2", "rollout.max_tokens=3"),
    *("eval.prompts=8", "eval.every=0", "checkpoint.every=1", "observe.samples_every=0"),
    "observe.show_every=0",
]


@pytest.fixture
def server(monkeypatch):
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    with socket.socket() as free:  # the server has it again when it comes back
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    found = ThreadedMotoServer("127.0.0.1", port=port, verbose=False)
    found.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    import s3fs

    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(f"bucket-{port}")
    found.bucket = f"s3://bucket-{port}"
    yield found
    found.stop()


def train(*overrides):
    said = []
    with make_console(1, "test") as view:
        view.message = said.append
        with Job(load_config([*SMALL, *overrides])) as job:
            said += job.resumed.notices
            loop.RunLoop(job, view).run()
    return said


def test_a_run_keeps_its_steps_in_a_bucket_and_survives_when_that_goes_away(
    server, tmp_path, monkeypatch, capsys
):
    url = f"{server.bucket}/runs/mine"
    command = [f"checkpoint.folder={url}", "resume=auto", f"run.directory={tmp_path / 'run'}"]
    train(*command, "trainer.steps=2")
    folders = CheckpointStore(parse_location(url))
    assert folders.steps() == [1, 2] and not folders.fault(1) and not folders.fault(2)
    files = list_file_sizes(folders.at(2))
    assert {"actor/rank-00000.json", "actor/rank-00000.safetensors", "driver.json"} <= files.keys()
    main_json(capsys, "checkpoint", "verify", url, "--json")

    complete = CheckpointStore.complete

    def goes_away(self, step, *rest):
        if step == 3:
            server.stop()
        return complete(self, step, *rest)

    monkeypatch.setattr(CheckpointStore, "complete", goes_away)
    words = r"Cannot write s3://.*/runs/mine/step-000003: .*See whether it can be reached"
    with pytest.raises(StorageError, match=words):
        train(*command, "trainer.steps=3")
    monkeypatch.setattr(CheckpointStore, "complete", complete)
    server.start()
    assert folders.steps() == [1, 2] and folders.unfinished() == [3]
    said = train(*command, "trainer.steps=3")
    assert any(line.endswith("after step 2") for line in said)
    assert folders.steps() == [2, 3] and folders.unfinished() == []
    exported = main_json(capsys, "checkpoint", "export", url, str(tmp_path / "out"), "--json")
    assert exported["step"] == 3 and (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.ray
@pytest.mark.long
def test_a_job_of_two_ranks_is_killed_and_loses_its_bucket(server, command, tmp_path):
    url = f"{server.bucket}/runs/ray"
    (tmp_path / "own.py").write_text(SLOW_REWARD)
    own = ["executor=ray", "num_devices=2", f"reward.function={tmp_path}/own.py:odd"]
    job = [*SMALL, *own, f"checkpoint.folder={url}", "resume=auto", "trainer.steps=12"]
    folders = CheckpointStore(parse_location(url))

    killed = command(*job)
    killed.wait_for("step 2: checkpoint saved")
    killed.process.kill()
    killed.finish()
    done = folders.steps()[-1]
    assert 2 <= done < 12 and not folders.fault(done)

    robbed = command(*job)
    robbed.wait_for(rf"after step {done}\b")
    robbed.wait_for(rf"step {done + 1}: checkpoint saved")
    server.stop()
    assert robbed.finish() == 1, robbed.output
    assert re.search(rf"Cannot write {url}/step-\d+.* See whether it can be reached", robbed.output)
    assert "Traceback" not in robbed.output
    server.start()
    done = folders.steps()[-1]
    assert done < 12 and not folders.fault(done)

    last = command(*job, "num_devices=1")  # which reads what two have written
    assert last.finish() == 0, last.output
    assert f"after step {done}\n" in last.output
    assert folders.steps() == [11, 12] and not folders.unfinished()
    rows = [json.loads(row) for row in (last.directory / "metrics.jsonl").open()]
    assert [row["step"] for row in rows if "reward/mean" in row] == list(range(1, 13))


def test_large_files_are_sent_in_parts_and_only_whole_ones_are_there(server):
    file = parse_location(f"{server.bucket}/large")
    block = bytes(range(256)) * (1 << 16)
    with file.writing() as sent:
        for _ in range(3):
            sent.write(block)
    assert list_file_sizes(file.parent) == {"large": 3 * len(block)}
    assert file.read_range(len(block) - 3, 6) == block[-3:] + block[:3]
    other = parse_location(f"{server.bucket}/other")
    with pytest.raises(ZeroDivisionError), other.writing() as sent:
        sent.write(block + block)
        raise ZeroDivisionError
    assert not other.is_file()


def main_json(capsys, *words):
    capsys.readouterr()
    try:
        main(words)
    except SystemExit as ended:
        assert not ended.code, capsys.readouterr().err
    return json.loads(capsys.readouterr().out)
