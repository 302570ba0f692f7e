"""Plans of precision through the built-in trainers and on ranks that compute in other bits."""

import json

import pytest
import torch
from engine_cases import CPU, DEALS, LEARNING, deal, make_batch, make_engine, parameters, update
from ranks import run_ranks

from hybridrl.checks.check_list import check
from hybridrl.console.console_choice import make_console
from hybridrl.errors import ConfigError
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.quantization.low_bit_linear import LowBitScoring
from hybridrl.run import loop
from hybridrl.systems.low_bits.low_bit_training import enable_low_bit_training
from hybridrl.systems.low_bits.precision_plan import (
    PrecisionPlan,
    RankPrecision,
    list_precision_notices,
)

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "model.dtype=float32"),
    *("trainer.steps=2", "data.prompts_per_step=4", "rollout.samples_per_prompt=2"),
    "warmup.steps=2",
    *("rollout.max_tokens=6", "eval.every=0", "eval.prompts=4", "algorithm.kl_coefficient=0.1"),
    *("model.tiny.hidden_size=64", "model.tiny.heads=2", "model.tiny.layers=3"),
]


def written(folder, plan, name="plan.json"):
    (folder / name).write_text(plan.to_json())
    return folder / name


def plan_of(use, *bits, layers=3, **found):
    ranks = [RankPrecision(one) for one in bits]
    return PrecisionPlan(use, layers, "float32", ranks, found)


def run(folder, name, *overrides):
    said = []
    config = load_config([*SMALL, f"run.directory={folder / name}", *overrides])
    with make_console(1, "test") as view:
        view.message = said.append
        with Job(config) as job:
            said += list_precision_notices(config, job.groups)  # as `main.run` tells them
            loop.RunLoop(job, view).run()
    rows = (folder / name / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row) for row in rows], "\n".join(map(str, said))


@pytest.mark.more
def test_a_reference_in_fewer_bits_through_grpo(tmp_path):
    """The KL of the first step is that of rounding alone, which is 0 without; warm-up gives the
    reference other weights, which it rounds again."""
    plan = written(tmp_path, plan_of("scoring", {0: 8, 2: 4}, token_kl=[0.25]))
    setting = f"models.reference.precision={plan}"
    whole, _ = run(tmp_path, "whole")
    low, said = run(tmp_path, "low", setting)
    warm, _ = run(tmp_path, "warm", setting, "warmup.learning_rate=1e-2")
    kls = [
        next(row["policy/kl"] for row in rows if "policy/kl" in row) for rows in (whole, low, warm)
    ]
    assert abs(kls[0]) < 1e-6 < kls[1] < 0.1
    assert 1e-6 < kls[2] < 0.5  # of the old weights it would be far more
    assert "computes 2 of 3 layers in fewer bits (0, 2)" in said and "0.25 nats" in said


@pytest.mark.more
def test_an_actor_that_learns_in_8_bits(tmp_path):
    plan = written(tmp_path, plan_of("training", {0: 8, 1: 16}))
    rows, said = run(tmp_path, "low", f"models.actor.precision={plan}")
    mismatch = [row["mismatch/k3"] for row in rows if "mismatch/k3" in row]
    assert mismatch and all(1e-9 < value < 0.1 for value in mismatch)
    assert "models.actor.precision: actor computes 2 of 3 layers" in said


@pytest.mark.parametrize(
    ("setting", "plan", "overrides", "said"),
    [
        ("models.actor", plan_of("scoring", {0: 8}), [], "this plan is for scoring"),
        ("models.reference", plan_of("training", {0: 8}), [], "this plan is for training"),
        ("models.actor", plan_of("training", {0: 8}, layers=4), [], "4 layers, and this one has 3"),
        ("models.actor", plan_of("training", {0: 8}, {}), [], "for 2 ranks, and `actor` has 1"),
        (
            "models.actor",
            plan_of("training", {0: 8}),
            ["model.dtype=bfloat16"],
            "model.dtype=float32",
        ),
        ("models.actor", plan_of("training", {0: 8}), ["actor.lora.rank=4"], "actor.lora.rank=4"),
        ("models.actor", plan_of("training", {0: 8}), ["model.tiny.experts=4"], "Leave it out"),
        (
            "models.reference",
            plan_of("scoring", {0: 8}),
            ["models.reference.parallel.tp=2", "executor=ray", "num_devices=2"],
            "tp=2",
        ),
        ("models.critic", plan_of("scoring", {0: 8}), ["algorithm=ppo"], "no setting"),
    ],
)
def test_what_a_plan_does_not_go_with_is_said_before_a_start(
    tmp_path, setting, plan, overrides, said
):
    file = written(tmp_path, plan)
    config = load_config([*SMALL, f"{setting}.precision={file}", *overrides])
    with pytest.raises(ConfigError, match=said):
        check(config)


BITS = [{}, {0: 8, 1: 16}]


def rank_program(rank):
    """Two ranks, of which the second one computes in fewer bits; and the same on one rank."""
    batch, found = make_batch(), {}
    mine = batch.take(deal(batch, DEALS[2][0])[rank])
    for name, bits in {"whole": {}, "low": BITS[rank]}.items():
        mesh = ParallelMesh(RankMesh({"dp": 2}), CPU)
        engine = make_engine(mesh, optimizer=LEARNING)
        enable_low_bit_training(engine.model.inner, bits)
        torch.manual_seed(rank)
        gradient, metrics = update(engine, mine)
        for _ in range(3):
            engine.update(mine, lambda out, columns, segments: loss_of(out), temperature=1.0)
        found[name] = gradient, metrics["grad_norm"], parameters(engine)
    scored = make_engine(ParallelMesh(RankMesh({"dp": 2}), CPU))
    before = scored.forward(mine, temperature=1.0)["log_probs"].values
    scored.forget_rounded = LowBitScoring(scored.model.inner, {1: 8} if rank else {}).forget
    after = scored.forward(mine, temperature=1.0)["log_probs"].values
    again = scored.forward(mine, temperature=1.0)["log_probs"].values
    none = scored.forward(mine.take([]), temperature=1.0)["log_probs"].values
    found["scores"] = before, after, again, none
    return found


def loss_of(outputs):
    from hybridrl.algorithms import TokenLoss

    return TokenLoss(-outputs["log_probs"], {})


@pytest.mark.more
def test_ranks_of_other_bits_train_and_score_together(tmp_path):
    first, second = run_ranks(rank_program, tmp_path, 2)
    for name in ("whole", "low"):
        assert torch.equal(first[name][2], second[name][2])  # one model on all ranks
        assert first[name][1] == pytest.approx(second[name][1])
    whole, low = first["whole"], first["low"]
    off = (whole[0] - low[0]).norm() / whole[0].norm()
    assert 1e-5 < off < 0.25
    assert (whole[2] - low[2]).norm() < 0.2 * whole[2].norm()
    before, after, again, none = first["scores"]
    assert torch.equal(before, after) and len(none) == 0
    before, after, again, none = second["scores"]
    assert torch.equal(after, again) and len(none) == 0
    assert 1e-6 < (before - after).abs().max() < 0.3
