"""Teachers with another tokenizer, and behind a URL: on two ranks, resumed, and learned from."""

import json

import pytest
import torch
from other_teachers import Job, make_folders, served, settings_of
from safetensors.torch import load_file

from hybridrl import load_config, main

CLOSE = 1e-5
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
