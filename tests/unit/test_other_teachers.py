"""Teachers with another tokenizer, and behind a URL: whole jobs against plain torch, and what goes
wrong with a server."""

import json

import other_teachers
import pytest
import torch
from other_teachers import Job, merged_tokenizer, served
from plain_cases import BASE
from settings import configured
from transformers import AutoModelForCausalLM

from hybridrl import main
from hybridrl.batch.batch import Batch
from hybridrl.controller import WorkerContext
from hybridrl.data.token_spelling import TokenSpelling
from hybridrl.errors import ConfigError, RemoteModelError
from hybridrl.job.config_resolution import load_config
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.trainers.distillation import Trainer
from hybridrl.workers.remote_teacher import RemoteTeacher
from hybridrl.workers.teacher_reading import TeacherReading
from hybridrl.workers.training_engines import ModelSource

pytestmark = pytest.mark.usefixtures("process_group")
CLOSE = 1e-5
FINE = (("a", "b"), ("c", "d"))
COARSE = (("a", "b"), ("ab", "c"), ("b", "c"), ("+", "="), ("d", "e"), ("de", "f"))
LOSSES = ("reverse", "forward", "sampled")
MODELS = {"student": (FINE, 0, 7), "same": (FINE, 0, 8), "other": (COARSE, 5, 8)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("teachers")
    for name, (merges, begin, seed) in MODELS.items():
        tokenizer = merged_tokenizer(*merges, begin=begin)
        shape = {"hidden_size": 32, "layers": 1, "heads": 1, "context": 64}
        make_tiny_model(root / name, tokenizer, seed=seed, **shape)
        model = AutoModelForCausalLM.from_pretrained(root / name)
        with torch.no_grad():  # a model that begins without preferences has nothing to show
            for parameter in model.parameters():
                parameter *= 4 if parameter.ndim > 1 else 1
        model.save_pretrained(root / name)
    texts = ["abcab", "bcde+=", "abcdefabcdef", "defab1", "cdab+", "ab", "fdeabc"]
    rows = [{"prompt": f"{n}+ab", "answer": "1", "response": t} for n, t in enumerate(texts)]
    for name, part in (("rows", rows[1:]), ("held_out", rows[:1])):
        (root / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return root


def settings_of(folder, program, loss, *further):
    return [
        *(f"algorithm={program}", *BASE, f"model.path={folder}/student"),
        *("data=jsonl", f"data.path={folder}/rows.jsonl", "data.shuffle=false"),
        *(f"data.eval_path={folder}/held_out.jsonl", "rollout.max_tokens=9"),
        *(f"distillation.loss={loss}", "distillation.top_k=11", *further),
    ]


@pytest.fixture
def worked_out(tmp_path, folder):
    def finish(program, loss, teacher, *further):
        aligned, run = teacher == "other", tmp_path / "run"
        wanted = ["distillation.alignment=bytes"] if aligned else []
        settings = settings_of(folder, program, loss, *wanted, f"run.directory={run}", *further)
        main.run(load_config([*settings, "executor=inline"]))
        return Job(run, folder / teacher, aligned).run()

    return finish


def cases():
    found = [("distillation", loss) for loss in LOSSES]
    return found + [("offline_distillation", loss) for loss in LOSSES[:2]]


@pytest.mark.parametrize(
    ("program", "loss"),
    [pytest.param(*case, marks=pytest.mark.more if n else ()) for n, case in enumerate(cases())],
)
def test_a_job_of_two_tokenizers_is_what_plain_torch_makes_of_it(worked_out, folder, program, loss):
    found = worked_out(program, loss, "other", f"models.teacher.path={folder}/other")
    assert {"policy/loss", "policy/grad_norm", "weights"} <= found.keys()
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)


@pytest.mark.parametrize("teacher", ["same", "other"])
@pytest.mark.parametrize(
    ("program", "loss"),
    [
        pytest.param(*case, marks=pytest.mark.more if n != 2 else ())
        for n, case in enumerate(cases())
    ],
)
def test_a_job_with_a_server_is_what_plain_torch_makes_of_it(
    worked_out, folder, program, loss, teacher
):
    with served(folder / teacher) as (url, requests):
        further = [f"models.teacher.tokenizer={folder}/other"] if teacher == "other" else []
        found = worked_out(program, loss, teacher, f"models.teacher.url={url}", *further)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)
    assert requests and {row["model"] for row in requests} == {"plain"}
