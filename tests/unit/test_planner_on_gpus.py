"""Plans of GPUs beside what was measured: on one H100 here, and by others. The figures are those of
docs/performance.md, whose planned columns are held to be what plans say."""

import re
from pathlib import Path

import pytest
from published_shapes import write_qwen3
from settings import configured
from tiers import few_of

from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import GIB, parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.memory import model_part
from hybridrl.planner.step.step_calls import SampleLengths

LOGITS = 4 * 160 * 2**20
"""Bytes of a chunk of float32 logits."""
OLD_HEAD = LOGITS + (4 - 2) * 1024 * 151936 - 4 * 1024 * 12953
"""Bytes that the output head took more when that H100 was used: a third chunk, and the embedding's
gradient in float32 instead of in bfloat16 and of a block of rows in float32."""
PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()


def rows_after(heading):
    """The cells of the first table behind a heading."""
    table = PAGE.partition(f"\n## {heading}\n")[2].partition("\n|")[2].partition("\n\n")[0]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines()[2:]]


ONE_GPU = rows_after("On one GPU")
PUBLISHED = rows_after("Plans and published figures")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = {}

    def of_size(size):
        if size not in made:
            made[size] = write_qwen3(tmp_path_factory.mktemp(size), size)
        return made[size]

    return of_size


def planned(path, devices, prompt, response, *overrides):
    """The seconds of an update, and the GiB that torch gives out for it."""
    cluster = parse_cluster(f"{devices}xH100")
    config = configured(["model.dtype=bfloat16", f"model.path={path}", *overrides])
    rates, lengths = DeviceRates.known(cluster, "bfloat16"), SampleLengths.alike(prompt, response)
    plan = build_job_plan(config, cluster, lengths=lengths, rates=rates)
    parts = next(p.parts for p in plan.memory[0].phases if p.phase == "train")
    taken = sum(size for name, size in parts.items() if name != "process")
    return plan.times.phases["actor", "train"], taken / GIB


def test_the_tables_are_whole():
    assert len(ONE_GPU) == 10 and len(PUBLISHED) == 11


@pytest.mark.parametrize("row", few_of(ONE_GPU, 8), ids=lambda row: re.sub(r"\W+", " ", row[0]))
def test_an_update_on_one_gpu(folder, row, monkeypatch):
    named, seconds, plan_s, _, gib, plan_gib = row
    settings = re.findall(r"[\w.]+=\w+", named)
    if "compile" not in named:  # what comes on top of the row with these
        settings += ["compile=false", "gradient_checkpointing=full"]
        settings += [f"{name}=true" for name in re.findall(r"offload_\w+", named)]
    one = ["rollout=transformers", "data.prompts_per_step=1", "rollout.samples_per_prompt=8"]
    one += ["actor.share_prefixes=false"]  # the rows that were measured had prompts of their own
    tokens = 4096 if "four micro-batches" in named else 16384
    actor = [f"actor.{setting}" for setting in settings]
    job = (folder("0.6B"), 1, 512, 1536, *one, f"actor.tokens_per_microbatch={tokens}", *actor)
    step, taken = planned(*job)
    assert (f"{step:.2f}", f"{taken:.1f}") == (plan_s, plan_gib)
    if "selective" not in named:  # which kept something else then
        assert step == pytest.approx(float(seconds), rel=0.25)
        chunks = model_part._LOGIT_CHUNKS + OLD_HEAD / LOGITS
        monkeypatch.setattr(model_part, "_LOGIT_CHUNKS", chunks)
        assert planned(*job)[1] == pytest.approx(float(gib), rel=0.15)


@pytest.mark.parametrize("row", few_of(PUBLISHED, 8), ids=lambda row: " ".join(row[:4]))
def test_published_updates(folder, row):
    size, trained, devices, tokens, _, seconds, plan_s, gib, plan_gib, off = row
    devices, tokens = int(devices), int(tokens.replace(",", ""))
    settings = ["algorithm=sft", "data=jsonl", "data.path=rows.jsonl"]
    settings += ["data.max_prompt_tokens=1024", f"data.max_response_tokens={tokens - 1024}"]
    settings += ["actor.lora.rank=16"] if trained == "LoRA" else []
    batches = 1 if tokens > 1e6 else 2
    if tokens > 1e6:
        settings += ["actor.parallel.ulysses=8", "actor.gradient_checkpointing=offload"]
        settings += ["data.prompts_per_step=1", f"actor.tokens_per_microbatch={tokens // devices}"]
    else:
        settings += [f"data.prompts_per_step={2 * devices}", "actor.gradient_checkpointing=full"]
        settings += [f"actor.tokens_per_microbatch={tokens}"]
    step, taken = planned(folder(size), devices, 1024, tokens - 1024, *settings)
    step /= batches
    assert (f"{step:.3g}", f"{taken:.1f}") == (plan_s, plan_gib)
    outside = {
        "s": step != pytest.approx(float(seconds), rel=0.25),
        "GiB": taken != pytest.approx(float(gib), rel=0.15),
    }
    # Each row that is outside says so, and the page says why, under the same name.
    assert off.split() == [name for name, is_outside in outside.items() if is_outside]
    assert all(f"\n* *{name}*: " in PAGE for name in off.split())
