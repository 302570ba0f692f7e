"""Teachers with another tokenizer, and behind a URL: on two ranks, resumed, and learned from."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

import plain_torch
import pytest
import torch
from other_teachers import Job, make_folders, served, settings_of
from safetensors.torch import load_file

from hybridrl import load_config, main
from hybridrl.batch.batch import Batch
from hybridrl.controller import WorkerContext
from hybridrl.workers.remote_teacher import RemoteTeacher
from hybridrl.workers.training_engines import ModelSource

CLOSE = 1e-5
COLUMNS = ("teacher_ids", "teacher_log_probs", "ref_log_probs")
SERVER_VARIABLES = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
ALIGNED = "distillation.alignment=bytes"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folders(tmp_path_factory.mktemp("teachers"))


@pytest.mark.more
@pytest.mark.ray
@pytest.mark.parametrize(
    ("program", "loss"),
    [("distillation", "sampled"), ("distillation", "reverse"), ("offline_distillation", "forward")],
)
def test_two_ranks_are_what_plain_torch_makes_of_them(run, folder, tmp_path, program, loss):
    """Three prompts of three samples, or three rows: neither divides."""
    own = ["num_devices=2", "ray.address=auto", "rollout.samples_per_prompt=3", ALIGNED]
    settings = [*settings_of(folder, program, loss), *own]
    found = run(*settings, f"models.teacher.path={folder}/other")
    figures = Job(found, folder / "other", aligned=True).run()
    assert figures == pytest.approx(dict.fromkeys(figures, 0.0), abs=CLOSE)
    with served(folder / "other") as (url, requests):
        remote = [f"models.teacher.url={url}", f"models.teacher.tokenizer={folder}/other"]
        found = run(*settings, *remote, f"run.directory={tmp_path / 'remote'}")
        assert requests
    figures = Job(found, folder / "other", aligned=True).run()
    assert figures == pytest.approx(dict.fromkeys(figures, 0.0), abs=CLOSE)


@pytest.mark.more
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("where", ["path", "url"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(folder, tmp_path, where):
    with served(folder / "other") as (url, _):
        named = {"path": [f"models.teacher.path={folder}/other"]}
        named["url"] = [f"models.teacher.url={url}", f"models.teacher.tokenizer={folder}/other"]
        settings = [*settings_of(folder, "distillation", "sampled"), ALIGNED, *named[where]]
        settings += ["executor=inline", "checkpoint.every=2", "trainer.steps=4"]
        ends = []
        for own in (f"run.directory={tmp_path}", f"resume={tmp_path}/checkpoints/step-000002"):
            main.run(load_config([*settings, own]))
            ends.append(load_file(tmp_path / "model" / "model.safetensors"))
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.long
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize(
    ("program", "loss", "rate"),
    [
        ("distillation", "reverse", 3e-3),
        ("distillation", "sampled", 3e-3),
        ("offline_distillation", "forward", 3e-3),
    ],
)
def test_a_student_comes_nearer_to_a_teacher_with_another_tokenizer(
    folder, tmp_path, program, loss, rate
):
    """The divergence, or what estimates it, falls."""
    settings = [
        *settings_of(folder, program, loss),
        *("executor=inline", f"models.teacher.path={folder}/other", ALIGNED, "trainer.steps=60"),
        *("data.prompts_per_step=6", "rollout.samples_per_prompt=16", "distillation.top_k=55"),
        *(f"actor.optimizer.learning_rate={rate}", "actor.tokens_per_microbatch=4000"),
        f"run.directory={tmp_path / 'run'}",
    ]
    main.run(load_config(settings))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    name = "policy/kl" if loss == "sampled" else "policy/loss"
    found = [row[name] for row in map(json.loads, lines) if name in row]
    first, last = (sum(part) / len(part) for part in (found[:5], found[-5:]))
    assert last < 0.8 * first


@pytest.mark.long
@pytest.mark.vllm
def test_vllms_own_server_is_a_teacher(folder, tmp_path):
    """Its start takes minutes on a busy machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += ["--model", str(folder / "same"), "--host=127.0.0.1", f"--port={port}"]
    command += ["--dtype=float32", "--max-model-len=64", "--max-logprobs=20"]
    log = tmp_path / "server.txt"
    with log.open("w") as output:
        server = subprocess.Popen(
            command, stdout=output, stderr=output, env={**os.environ, **SERVER_VARIABLES}
        )
    url = f"http://127.0.0.1:{port}/v1"
    try:
        for _ in range(500):
            assert server.poll() is None, log.read_text()[-2000:]
            with suppress(OSError), urllib.request.urlopen(f"{url}/models", timeout=5):
                break
            time.sleep(1)
        source = ModelSource(str(folder / "student"), str(folder / "student"), "float32", 64, (1,))
        context = WorkerContext("teacher", 0, 1)
        teacher = RemoteTeacher(context, source, url, top_k=20)
        rows = {"prompt_ids": [[3, 20, 30]] * 2, "response_ids": [[31, 32, 1], [49]]}
        batch = Batch.from_columns(rows)
        found = teacher.compute_top_log_probs(batch) | teacher.compute_ref_log_prob(batch)
        teacher.close()
    finally:
        server.terminate()
        server.wait(60)
    model = plain_torch.Model(folder / "same").frozen()
    for place, row in enumerate(batch.to_pylist()):
        with torch.no_grad():
            table, scored = model.distributions(row, 1.0), model.log_probs(row, 1.0)[0]
        ids, values, own = (found.ragged(name).rows()[place] for name in COLUMNS)
        ids = ids.long().view(-1, 20)
        assert torch.equal(ids.sort(1).values, table.topk(20).indices.sort(1).values)
        expected = table.gather(1, ids).float()
        torch.testing.assert_close(values.view(-1, 20), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(own, scored.float(), atol=1e-5, rtol=0)
