"""TrainEngine: how a batch is split into micro-batches never changes the mathematics."""

import math

import pytest
import torch
from engine_cases import (
    CLIPPED,
    LEARNING,
    LENGTHS,
    LONGEST,
    TEMPERATURE,
    assert_same_gradient,
    assert_same_metrics,
    expectations,
    flat,
    make_batch,
    make_engine,
    make_model,
    parameters,
    update,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tiers import few_of
from transformers import AutoModelForCausalLM

from hybridrl.algorithms import PreferenceObjective, TokenLoss, negative_log_likelihood
from hybridrl.algorithms.token_weighting import AGGREGATION_MODES
from hybridrl.config.model_schema import AUTO_SCHEDULE, SCHEDULES
from hybridrl.config.schema import CHECKPOINTING_MODES, ActorConfig, OptimizerConfig
from hybridrl.controller.worker import WorkerContext
from hybridrl.engine.optimizer import learning_rate_factor, make_optimizer
from hybridrl.engine.train_engine import MAX_SKIPPED_UPDATES
from hybridrl.errors import ConfigError, DataError, TrainingError
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.parallel import fsdp
from hybridrl.workers.actor_worker import ActorWorker
from hybridrl.workers.training_engines import ModelSource, build_policy_engine


@pytest.fixture(scope="module")
def plain():
    return expectations()


@pytest.fixture(scope="module")
def engine(mesh):
    return make_engine(mesh)


@given(budget=st.integers(LONGEST, 150), order=st.permutations(range(len(LENGTHS))))
@settings(max_examples=15)
def test_any_budget_and_order_gives_one_gradient(engine, plain, budget, order):
    engine.config.tokens_per_microbatch = budget
    found, metrics = update(engine, make_batch().take(order))
    gradient, expected = plain(AGGREGATION_MODES[0], CLIPPED)
    assert_same_gradient(found, gradient)
    assert_same_metrics(metrics, expected)


def test_forward_equals_the_log_probs_of_update(engine):
    engine.config.tokens_per_microbatch = LONGEST
    batch = make_batch()
    seen = []

    def spy(outputs, columns, segments):
        found = (outputs["log_probs"].detach(), outputs["entropy"].detach())
        seen.append((columns["prompt_numbers"], *found))
        return negative_log_likelihood(outputs["log_probs"])

    numbered = batch.with_columns({"prompt_numbers": torch.arange(len(batch))})
    engine.update(numbered, spy, temperature=TEMPERATURE)
    assert len(seen) > 1
    numbers, *columns = (torch.cat(parts) for parts in zip(*seen, strict=True))
    order = numbers.argsort(stable=True)
    scored = engine.forward(batch, temperature=TEMPERATURE)
    assert scored.columns == ["log_probs", "entropy"]
    for name, column in zip(scored.columns, columns, strict=True):
        assert torch.equal(scored[name].cu_seqlens, batch["response_ids"].cu_seqlens)
        torch.testing.assert_close(scored[name].values, column[order], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("checkpointing", [*CHECKPOINTING_MODES, True])
@pytest.mark.parametrize("small", few_of([True, False], [False]))
def test_checkpointing_and_units_change_nothing(mesh, plain, monkeypatch, small, checkpointing):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 1 << 20 if small else 0)
    engine = make_engine(mesh, gradient_checkpointing=checkpointing, tokens_per_microbatch=60)
    assert_same_gradient(update(engine, make_batch())[0], plain(AGGREGATION_MODES[0], CLIPPED)[0])


def test_half_precision_computes_near_the_float32_master_weights(mesh, plain):
    engine = make_engine(mesh, dtype="bfloat16")
    found, metrics = update(engine, make_batch())
    gradient, expected = plain(AGGREGATION_MODES[0], CLIPPED)
    assert found.dtype == parameters(engine).dtype == torch.float32
    assert torch.cosine_similarity(found, gradient, dim=0) > 0.98
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=0.05)


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1.0), (0.25, 0.25), (3.0, 1.0)])
def test_clipping(mesh, plain, share, kept):
    """`max_grad_norm` as a share of the norm there is; 0 switches it off."""
    gradient, expected = plain(AGGREGATION_MODES[0], CLIPPED)
    norm = expected["grad_norm"]
    settings = OptimizerConfig(max_grad_norm=share * norm)
    engine = make_engine(mesh, optimizer=settings, tokens_per_microbatch=60)
    found, metrics = update(engine, make_batch())
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), "the norm before clipping"
    assert_same_gradient(found, kept * gradient)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_leaves_the_parameters_alone(mesh, value):
    engine = make_engine(mesh, optimizer=LEARNING, tokens_per_microbatch=LONGEST)
    batch = make_batch()
    advantages = batch["advantages"].clone()
    advantages[1] = value
    before = parameters(engine)
    metrics = engine.update(batch.with_columns({"advantages": advantages}), CLIPPED)
    assert not math.isfinite(metrics["grad_norm"])
    assert torch.equal(parameters(engine), before)
    assert engine.schedule.last_epoch == 0, "the schedule counts the steps that are taken"
    metrics = engine.update(batch, CLIPPED)
    assert math.isfinite(metrics["grad_norm"])
    after = parameters(engine)
    assert torch.isfinite(after).all() and not torch.equal(after, before)


def test_what_stands_off_the_mask_does_not_matter(engine, plain):
    batch = make_batch()
    off = batch["response_mask"].values == 0
    for name in ("log_probs", "ref_log_probs", "rollout_log_probs"):
        column = batch[name]
        values = column.values.masked_fill(off, math.nan)
        batch = batch.with_columns({name: column._replace(values=values)})
    found, metrics = update(engine, batch)
    gradient, expected = plain(AGGREGATION_MODES[0], CLIPPED)
    assert_same_gradient(found, gradient)
    assert_same_metrics(metrics, expected)


def test_each_update_rounds_from_a_seed_of_its_own(mesh, monkeypatch):
    """Of the engine's seed and the number of the update, which checkpoints keep."""
    seen = []
    monkeypatch.setattr(
        "hybridrl.engine.train_engine.seed_rounding", lambda _, seed: seen.append(seed)
    )
    for seed in (3, 3, 4):
        engine = make_engine(mesh)
        engine.rounding_seed = seed
        for _ in range(2):
            engine.update(make_batch(), CLIPPED, temperature=TEMPERATURE)
    assert seen[:2] == seen[2:4] and len(set(seen)) == 4


def test_a_sample_longer_than_the_budget_is_named(engine):
    engine.config.tokens_per_microbatch = LONGEST - 1
    with pytest.raises(ConfigError, match=r"`actor\.tokens_per_microbatch` = 30"):
        engine.update(make_batch(), CLIPPED)


def test_learning_raises_the_likelihood_of_what_is_learned(mesh):
    engine = make_engine(mesh, optimizer=LEARNING, tokens_per_microbatch=60)
    batch = make_batch()

    def loss(outputs, columns, segments):
        return negative_log_likelihood(outputs["log_probs"])

    losses = [engine.update(batch, loss)["loss"] for _ in range(12)]
    assert losses[-1] < 0.5 * losses[0]


def test_a_saved_model_is_the_model(mesh, tmp_path):
    engine = make_engine(mesh, optimizer=LEARNING)
    engine.update(make_batch(), CLIPPED)
    engine.save(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=PACKED_ATTENTION)
    state = dict(engine.full_parameters())
    assert state.keys() == dict(loaded.named_parameters()).keys()
    assert all(torch.equal(value, state[name]) for name, value in loaded.named_parameters())
    assert not torch.equal(flat(state.values()), flat(make_model().parameters()))


def test_a_forward_leaves_the_exact_weights_to_be_read_and_replaced(mesh, tmp_path):
    engine = make_engine(mesh, dtype="bfloat16")
    engine.forward(make_batch())
    exact = flat(parameter for parameter in make_model().parameters())
    assert torch.equal(parameters(engine), exact), "not those rounded for the forward"
    engine.forward(make_batch())
    other = make_model()
    for parameter in other.parameters():
        parameter.data += 1.0
    other.save_pretrained(tmp_path)
    engine.load(tmp_path)
    engine.update(make_batch(), CLIPPED)
    assert torch.equal(parameters(engine), exact + 1.0)


def test_a_frozen_model_is_held_in_half_precision_and_its_averages_are_not(mesh, tmp_path):
    """A frozen model says the same as one that is rounded for each forward. Steps of a moving
    average that bfloat16 would round away add up."""
    made, other = make_model(), make_model()
    made.save_pretrained(tmp_path / "model")
    for parameter in other.parameters():
        parameter.data += 1.0
    other.save_pretrained(tmp_path / "other")
    folder = str(tmp_path / "model")
    source = ModelSource(folder, folder, "bfloat16", context_length=64, eos_token_ids=())
    context = WorkerContext("reference", rank=0, world_size=1)
    frozen = build_policy_engine(context, source, ActorConfig(), trains=False)
    assert {parameter.dtype for parameter in frozen.model.parameters()} == {torch.bfloat16}
    found, expected = (
        engine.forward(make_batch(), temperature=TEMPERATURE)["log_probs"].values
        for engine in (frozen, make_engine(mesh, dtype="bfloat16"))
    )
    assert torch.equal(found, expected)
    began, steps, share = parameters(frozen).float(), 30, 0.001
    for _ in range(steps):
        frozen.load(tmp_path / "other", share)
    moved = (parameters(frozen).float() - began).mean()
    assert moved == pytest.approx(1 - (1 - share) ** steps, rel=0.02)


def test_weights_of_another_model_are_refused(mesh, tmp_path, caplog):
    engine = make_engine(mesh)
    before = parameters(engine)
    with pytest.raises(ConfigError, match=rf"{tmp_path} has no weights for this model.*embed_tok"):
        engine.load(tmp_path)
    state = {name: value.clone() for name, value in make_model().named_parameters()}
    save_file({f"other.{name}": value for name, value in state.items()}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="none of its safetensors"):
        engine.load(tmp_path)
    norm = "model.norm.weight"
    save_file(state | {norm: torch.ones(3)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match=rf"`{norm}` of the shape \[3\].*is \[16\]"):
        engine.load(tmp_path)
    assert torch.equal(parameters(engine), before)
    assert not caplog.records


def test_weights_that_are_missing_stay_and_are_named(mesh, tmp_path, caplog):
    engine = make_engine(mesh)
    state = {name: value + 1.0 for name, value in make_model().named_parameters()}
    del state["model.norm.weight"]
    save_file(state, tmp_path / "a.safetensors")
    engine.load(tmp_path)
    assert "no weights for 1 of the model's" in caplog.text and "model.norm.weight" in caplog.text
    found = dict(engine.full_parameters())
    for name, value in make_model().named_parameters():
        assert torch.equal(found[name], state.get(name, value))


def test_updates_that_are_skipped_are_counted_and_end_the_job(mesh):
    engine = make_engine(mesh)
    bad = make_batch().with_columns({"advantages": torch.full((len(LENGTHS),), math.nan)})
    assert engine.update(make_batch(), CLIPPED)["skipped_updates"] == 0.0
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        assert engine.update(bad, CLIPPED)["skipped_updates"] == 1.0
    assert engine.update(make_batch(), CLIPPED)["skipped_updates"] == 0.0
    for _ in range(MAX_SKIPPED_UPDATES - 1):
        engine.update(bad, CLIPPED)
    with pytest.raises(
        TrainingError, match=rf"{MAX_SKIPPED_UPDATES} updates in a row .*learning_rate"
    ):
        engine.update(bad, CLIPPED)


def test_where_a_number_first_was_not_finite_is_known(mesh):
    engine = make_engine(mesh)
    advantages = torch.zeros(len(LENGTHS))
    advantages[2] = math.inf
    engine.update(make_batch().with_columns({"advantages": advantages}), CLIPPED)
    assert engine.fault == (1, f"the column `advantages`, row 2 of its {len(LENGTHS)}")
    engine.update(make_batch(), CLIPPED)
    assert engine.fault is None

    def wrong(outputs, columns, segments):
        return TokenLoss(outputs["log_probs"] / 0.0, {})

    engine.update(make_batch(), wrong)
    assert engine.fault == (2, "its loss")
    norm = engine.model.inner.model.norm.weight
    engine._gradients.finish = lambda: norm.grad.to_local().fill_(math.inf)
    engine.update(make_batch(), CLIPPED)
    assert engine.fault == (3, "the gradient of `model.norm.weight`")
    norm.data.to_local()[0] = math.nan
    engine.update(make_batch(), CLIPPED)
    assert engine.fault == (0, "the weight `model.norm.weight` itself")


def test_the_learning_rate_is_reported_and_a_phase_begins_anew(mesh):
    engine = make_engine(mesh)
    settings = OptimizerConfig(learning_rate=0.5, warmup_steps=2, schedule="linear", min_ratio=0.1)
    for _ in range(2):
        engine.start_optimizer(settings, updates=4)
        rates = [engine.update(make_batch(), CLIPPED)["learning_rate"] for _ in range(6)]
        assert rates == pytest.approx([0.25, 0.5, 0.5, 0.05, 0.05, 0.05])


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 30),
    st.integers(0, 40),
    st.floats(0, 1, allow_subnormal=False),
)
def test_rate_factor(schedule, updates, warmup, least):
    config = OptimizerConfig(schedule=schedule, warmup_steps=warmup, min_ratio=least)
    factors = [learning_rate_factor(step, config, updates) for step in range(updates + warmup + 5)]
    assert 0 < factors[0] <= 1
    rise, fall = factors[:warmup], factors[warmup:]
    assert rise == sorted(rise) and fall == sorted(fall, reverse=True)
    assert not warmup or rise[-1] == 1
    assert all(least - 1e-9 <= factor <= 1 for factor in fall)
    if schedule in ("constant", AUTO_SCHEDULE):
        assert set(fall) == {1.0}
    elif schedule == "inverse_sqrt":
        since = len(fall) - 1
        expected = (max(1, warmup) / (max(1, warmup) + since)) ** 0.5
        assert fall[0] == 1 and fall[-1] == pytest.approx(max(least, expected))
    else:
        last = max(updates - 1, warmup + 1)  # the fall takes one step at least
        assert factors[last:] == pytest.approx([least] * len(factors[last:]))


def test_the_rate_of_wsd_stays_and_then_falls():
    config = OptimizerConfig(schedule="wsd", warmup_steps=2, min_ratio=0.1, decay_share=0.3)
    found = [learning_rate_factor(step, config, 10) for step in range(11)]
    assert found == pytest.approx([0.5, *[1] * 6, 0.7, 0.4, 0.1, 0.1])


def test_biases_and_norms_do_not_decay():
    model = make_model()
    optimizer, _ = make_optimizer(
        dict(model.named_parameters()), OptimizerConfig(weight_decay=0.1), 1
    )
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert held == len(list(model.parameters()))


def test_an_engine_that_leaves_the_device_between_calls_learns_the_same(mesh):
    """Here the move is from memory to the same memory; what it does to sharded parameters and
    optimizer state is what it does on a GPU."""
    batch, found = make_batch("token-mean"), []
    for offloads in (False, True):
        engine = make_engine(mesh, optimizer=LEARNING)
        engine._offloads_all = offloads
        engine.offload()
        losses = []
        for _ in range(3):
            engine.onload()
            engine.forward(batch)
            losses.append(update(engine, batch)[1]["loss"])
            engine.offload()
        engine.onload()
        found.append((losses, parameters(engine)))
    assert found[0][0] == found[1][0] and len(set(found[0][0])) == 3
    assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("column", "words"),
    [("advantages", "advantage estimator"), ("loss_weights", "update_columns.loss_weights")],
)
def test_a_column_that_an_update_lacks_is_named(engine, column, words):
    engine.config.tokens_per_microbatch = LONGEST
    batch = make_batch()
    without = batch.select([name for name in batch.columns if name != column])
    with pytest.raises(DataError, match=f"reads the column `{column}`.* not have.*{words}"):
        engine.update(without, CLIPPED, temperature=TEMPERATURE)


@pytest.mark.parametrize("column", ["advantages", "rollout_log_probs", "loss_weights"])
def test_a_column_of_other_lengths_is_named(engine, column):
    engine.config.tokens_per_microbatch = LONGEST
    batch = make_batch().with_columns({column: [[0.5]] * len(LENGTHS)})
    with pytest.raises(DataError, match=f"`{column}`, which does not have a number for each"):
        engine.update(batch, CLIPPED, temperature=TEMPERATURE)


def test_columns_of_the_data_may_have_any_lengths(engine, plain):
    batch = make_batch().with_columns({"numbers": [[1, 2, 3]] * len(LENGTHS)})
    engine.config.tokens_per_microbatch = LONGEST
    assert_same_gradient(update(engine, batch)[0], plain(AGGREGATION_MODES[0], CLIPPED)[0])


def test_a_loss_may_change_its_columns_in_place(engine):
    """It has copies, on CPUs as on others."""
    batch = make_batch()

    def loss(outputs, columns, segments):
        for name in ("advantages", "ref_log_probs"):
            columns[name].zero_()
        return negative_log_likelihood(outputs["log_probs"])

    engine.config.tokens_per_microbatch = 10_000
    engine.update(batch, loss)
    assert batch["advantages"].any() and batch["ref_log_probs"].values.any()


def test_a_loss_of_pairs_and_one_of_samples_are_not_mixed_up():
    worker = ActorWorker.__new__(ActorWorker)
    worker.context = WorkerContext("actor", 0, 1)
    worker._objective = CLIPPED
    with pytest.raises(ConfigError, match=r"actor.update_preference .*policy_loss=ppo_clip"):
        worker.update_preference(make_batch())
    worker._objective = PreferenceObjective()
    with pytest.raises(ConfigError, match=r"actor.update_actor .*preference.loss=sigmoid"):
        worker.update_actor(make_batch())
