"""Whole jobs, worked out again by plain torch that imports nothing of the library."""

import ast
import json
import runpy
from pathlib import Path

import plain_torch
import pytest
import torch
from plain_cases import ONLINE, OPTIMIZERS, WITHOUT_REFERENCE, make_folders, settings_of
from tiers import few_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybridrl import cli, main
from hybridrl.job.config_resolution import load_config

pytestmark = pytest.mark.usefixtures("process_group")
CLOSE = 1e-5
QUICK = [
    ("grpo", ["temperature", "two updates", "two epochs", "entropy", "correction"]),
    ("ppo", ["temperature", "two updates", "critic epochs", "KL in the reward", "supervised"]),
    ("ppo", ["temperature", "two updates", "KL limit", "supervised"]),
    ("grpo", ["temperature", "LoRA", "KL in the loss", "tool tokens"]),
    ("grpo", ["temperature", "two updates", "4 bits", "KL in the loss"]),
    *((program, ["4 bits"]) for program in ("sft", "reward_model", "ppo")),
    ("sampled", ["temperature", "two updates"]),
    ("distillation", ["temperature", "two updates"]),
    ("vespo", ["temperature", "two updates", "far negatives"]),
    ("dppo", ["temperature", "two updates"]),
    ("dppo_kl", ["temperature", "two updates"]),
    *(("luspo", []), ("maxrl", ["temperature"]), ("gdpo", ["temperature", "two updates"])),
    *((program, []) for program in (*WITHOUT_REFERENCE, "kto")),
    *((program, ["temperature"]) for program in ONLINE),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(root)  # for the task
        yield make_folders(root)


@pytest.fixture
def worked_out(tmp_path, folders):
    """Runs a job in this process; how far each of its numbers is from plain torch's."""

    def run(program, options, *overrides):
        settings = settings_of(program, options, folders)
        folder = tmp_path / "run"
        config = load_config([*settings, "executor=inline", f"run.directory={folder}", *overrides])
        main.run(config)
        name = "holes" if "dropped samples" in options else "digits"
        rewarded = runpy.run_path(folders.program)[name]
        return plain_torch.recompute(folder, rewarded)

    return run


def test_plain_torch_imports_nothing_of_the_library():
    tree = ast.parse(Path(plain_torch.__file__).read_text())
    names = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    known = {"torch", "transformers", "safetensors", "pyarrow", "numpy", "yaml"}
    standard = {"statistics", "copy", "json", "math", "collections", "itertools", "pathlib"}
    assert {name.partition(".")[0] for name in names} <= known | standard


@pytest.mark.parametrize(
    ("program", "options"),
    [pytest.param(*case, marks=pytest.mark.more if n else ()) for n, case in enumerate(QUICK)],
)
def test_a_job_is_what_plain_torch_makes_of_it(worked_out, program, options):
    found = worked_out(program, options)
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)


@pytest.mark.more
def test_an_export_has_the_weights_that_a_base_in_4_bits_was_trained_with(tmp_path, folders):
    """And its samples come from these, from the first step on."""
    settings = settings_of("grpo", ["KL in the loss"], folders)
    run, out = tmp_path / "run", tmp_path / "out"
    given = [f"run.directory={run}", "checkpoint.every=3", "executor=inline"]
    given += ["actor.lora={rank: 2, base_format: nf4}", "actor.optimizer.learning_rate=1e-2"]
    main.run(load_config([*settings, *given]))
    with pytest.raises(SystemExit, match="0"):
        cli.main(["checkpoint", "export", str(run), str(out), "--merged"])
    learned = plain_torch.Model(folders.model, adapters=run / "model", bits="nf4")
    plain = AutoModelForCausalLM.from_pretrained(out)
    ids = AutoTokenizer.from_pretrained(out)("1+2=").input_ids
    hidden, head = learned.hidden(ids)
    found = plain(torch.tensor([ids])).logits[0].double()
    torch.testing.assert_close(found, hidden @ head.T, atol=1e-4, rtol=1e-4)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    found = [row["mismatch/k3"] for row in rows if "mismatch/k3" in row]
    assert len(found) == 3 and max(found) < 1e-9


@pytest.mark.parametrize("optimizer", few_of(OPTIMIZERS, ["muon in int8"]))
@pytest.mark.parametrize("program", ["sft", pytest.param("grpo", marks=pytest.mark.more)])
def test_optimizers_step_as_those_of_plain_torch(worked_out, program, optimizer):
    options = ["temperature", "two updates"]
    found = worked_out(program, options, *OPTIMIZERS[optimizer])
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=CLOSE)
