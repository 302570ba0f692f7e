"""TrainEngine: how a batch is split over ranks and micro-batches never changes the mathematics."""

import itertools
import math
import multiprocessing
import os
import socket
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.algorithms import PolicyObjective, Segments, negative_log_likelihood, token_weights
from hybridrl.algorithms.weights import MODES
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.controller.worker import Context, Rendezvous
from hybridrl.core.batch import Batch, Ragged
from hybridrl.engine import TrainEngine
from hybridrl.engine.optimizer import SCHEDULES, make_optimizer, rate_factor
from hybridrl.engine.train import token_columns
from hybridrl.errors import ConfigError
from hybridrl.models import CausalPolicy, PackedSamples
from hybridrl.models.attention import NAME
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import data_parallel_mesh, join

CPU = torch.device("cpu")
WORLD = 4
TEMPERATURE = 0.8
LENGTHS = [
    (3, 4),
    (5, 20),
    (1, 1),
    (9, 2),
    (2, 13),
    (4, 6),
    (7, 0),
    (2, 8),
    (3, 3),
    (1, 30),
    (6, 5),
]
LONGEST = max(map(sum, LENGTHS))
BUDGETS = (LONGEST, 60, 10_000)
# By number of ranks: how many samples each rank gets.
DEALS = {
    1: [(11,)],
    2: [(6, 5), (10, 1), (0, 11)],
    4: [(3, 3, 3, 2), (7, 1, 0, 3)],
}
CLIPPED = PolicyObjective("ppo_clip", {}, kl_coefficient=0.1, entropy_coefficient=0.01)
LEARNING = OptimizerConfig(learning_rate=0.03)
WHOLE_SAMPLES = PolicyObjective("gspo", {"clip_low": 0.1, "clip_high": 0.1})


def make_model():
    """The same tiny random model in every process."""
    config = Qwen2Config(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME)
    model.config.use_cache = False
    return model


def make_batch(mode="token-mean"):
    """Every sample of the mini-batch, with all that an objective may read; holes in the mask."""
    generator = torch.Generator().manual_seed(0)
    responses = torch.tensor([0, *itertools.accumulate(n for _, n in LENGTHS)])
    tokens = int(responses[-1])

    def column(scale, shift=0.0):
        return Ragged(scale * torch.randn(tokens, generator=generator) + shift, responses)

    mask = torch.rand(tokens, generator=generator) < 0.8
    weights = token_weights(
        mask, mode, length_norm=30, segments=Segments.from_cu_seqlens(responses)
    )
    return Batch.from_columns(
        {
            "prompt_ids": [torch.randint(23, (n,), generator=generator) for n, _ in LENGTHS],
            "response_ids": [torch.randint(23, (n,), generator=generator) for _, n in LENGTHS],
            "response_mask": Ragged(mask, responses),
            "loss_weights": Ragged(weights, responses),
            "advantages": torch.randn(len(LENGTHS), generator=generator),
            "log_probs": column(0.5, -3.0),
            "ref_log_probs": column(0.5, -3.0),
            "rollout_log_probs": column(0.5, -3.0),
            "text": [f"sample {row}" for row in range(len(LENGTHS))],
        }
    )


def deal(batch, counts):
    """Rows for each rank, `counts` of them, from all over the batch."""
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(7)).tolist()
    edges = [0, *itertools.accumulate(counts)]
    return [order[start:stop] for start, stop in itertools.pairwise(edges)]


def reduced(name, values, mask, rows):
    if name.endswith("_max"):
        return float(values[mask].max())
    return float(values[rows if name.endswith("_by_row") else mask].mean())


def plain_update(batch, objective):
    """Gradient and metrics of the whole mini-batch at once: no engine, no shards, no split."""
    policy = CausalPolicy(make_model())
    samples = PackedSamples.of(batch, CPU)
    outputs = policy(samples, TEMPERATURE)
    columns = token_columns(batch, CPU)
    mask = columns["response_mask"].bool()
    segments = Segments.from_cu_seqlens(samples.response_bounds, mask)
    loss, metrics = objective(outputs, columns, segments)
    value = (loss * columns["loss_weights"])[mask].sum()
    value.backward()
    found = {
        name.removesuffix("_by_row"): reduced(name, values, mask, segments.lengths > 0)
        for name, values in metrics.items()
    }
    gradient = flat(parameter.grad for parameter in policy.parameters())
    found |= {"loss": float(value.detach()), "tokens": float(mask.sum())}
    found["rows"] = float((segments.lengths > 0).sum())
    found["grad_norm"] = float(gradient.norm())
    return gradient, found


def make_engine(mesh, dtype="float32", optimizer=None, **settings):
    """An engine that records each gradient its optimizer is given, whole. It learns nothing,
    unless it gets an optimizer's settings."""
    config = ActorConfig(**settings)
    engine = TrainEngine(CausalPolicy(make_model()), mesh, CPU, dtype, config)
    standing = OptimizerConfig(learning_rate=0.0, max_grad_norm=0.0)
    engine.start_optimizer(optimizer or standing, updates=1000)
    engine.gradients = []
    engine.optimizer.register_step_pre_hook(
        lambda *_: engine.gradients.append(
            flat(whole(parameter.grad) for parameter in engine.model.parameters())
        )
    )
    return engine


def update(engine, batch, objective=CLIPPED):
    """Gradient and metrics of one update."""
    engine.gradients.clear()
    metrics = engine.update(batch, objective, temperature=TEMPERATURE)
    (gradient,) = engine.gradients
    return gradient, metrics


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def flat(tensors):
    return torch.cat([tensor.detach().flatten().clone() for tensor in tensors])


def parameters(engine):
    return flat(tensor for _, tensor in engine.full_parameters())


def assert_same_gradient(found, expected):
    assert float((found - expected).norm()) <= 1e-5 * float(expected.norm())


def assert_same_metrics(found, expected):
    found = {name: value for name, value in found.items() if name != "learning_rate"}
    assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


def cases():
    """(ranks, deal, budget, mode, objective, small) of every update of the distributed run."""
    for ranks, deals in DEALS.items():
        for (i, counts), (j, mode) in itertools.product(enumerate(deals), enumerate(MODES)):
            yield ranks, counts, BUDGETS[(i + j) % len(BUDGETS)], mode, CLIPPED, True
        yield ranks, deals[-1], LONGEST, MODES[1], WHOLE_SAMPLES, True
        yield ranks, deals[-1], LONGEST, MODES[0], CLIPPED, False


def rank_program(rank, address, port, listener, folder):
    """What each of four processes does; it writes what it found, and tests compare."""
    rendezvous = Rendezvous(address, port, listener if rank == 0 else None)
    join(Context("actor", rank, WORLD, host=rank, hosts=WORLD, rendezvous=rendezvous))
    meshes = {n: DeviceMesh("cpu", list(range(n)), mesh_dim_names=("dp",)) for n in (1, 2)}
    meshes[WORLD] = data_parallel_mesh(CPU, WORLD)
    found = {"updates": {}, "forwards": {}}
    engines = {}
    for case in cases():
        ranks, counts, budget, mode, objective, small = case
        if rank >= ranks:
            continue
        if (ranks, small) not in engines:
            fsdp.SMALL_MODEL_BYTES = 1 << 20 if small else 0
            engines[ranks, small] = make_engine(meshes[ranks])
        engine = engines[ranks, small]
        engine.config = replace(engine.config, tokens_per_microbatch=budget)
        batch = make_batch(mode)
        mine = batch.take(deal(batch, counts)[rank])
        found["updates"][str(case)] = update(engine, mine, objective)
        if mode == MODES[0]:
            scored = engine.forward(mine, temperature=TEMPERATURE)
            found["forwards"][str(case)] = scored.to_pylist()
    if rank < 2:
        found["spoiled"] = spoil(make_engine(meshes[2], optimizer=LEARNING), rank)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def spoil(engine, rank):
    """Two updates of two ranks; in the first one a sample of rank 1 has no finite advantage."""
    batch = make_batch()
    mine = batch.take(deal(batch, (6, 5))[rank])
    bad = mine["advantages"].clone()
    bad[0] = math.inf if rank == 1 else bad[0]
    before = parameters(engine)
    norm = engine.update(mine.with_columns({"advantages": bad}), CLIPPED)["grad_norm"]
    between = parameters(engine)
    engine.update(mine, CLIPPED)
    return norm, torch.equal(before, between), torch.equal(before, parameters(engine))


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What each of four processes found; they are forked from one that has torch imported."""
    folder = tmp_path_factory.mktemp("ranks")
    modules = ["hybridrl.engine", "transformers.models.qwen2.modeling_qwen2"]
    multiprocessing.set_forkserver_preload(modules)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        torch.multiprocessing.start_processes(
            rank_program,
            args=(*listener.getsockname(), listener, folder),
            nprocs=WORLD,
            start_method="forkserver",
        )
    return [torch.load(folder / f"{rank}.pt") for rank in range(WORLD)]


@pytest.fixture(scope="module")
def plain():
    """The expected gradient and metrics, by mode and objective; each worked out once."""
    known = {}

    def expected(mode, objective):
        key = (mode, objective.policy_loss)
        if key not in known:
            known[key] = plain_update(make_batch(mode), objective)
        return known[key]

    return expected


@pytest.mark.parametrize("ranks", DEALS)
def test_any_split_over_ranks_and_micro_batches_gives_one_gradient(ranks, four_ranks, plain):
    mine = [case for case in cases() if case[0] == ranks]
    assert {case[3] for case in mine} == set(MODES)
    for case in mine:
        _, _, _, mode, objective, _ = case
        gradient, metrics = plain(mode, objective)
        for rank in range(ranks):
            found, of_rank = four_ranks[rank]["updates"][str(case)]
            assert_same_gradient(found, gradient)
            assert_same_metrics(of_rank, metrics)


@pytest.mark.parametrize("ranks", DEALS)
def test_forward_gives_each_rank_its_rows_in_order(ranks, four_ranks):
    batch = make_batch()
    exact = CausalPolicy(make_model())(PackedSamples.of(batch, CPU), TEMPERATURE)
    bounds = batch["response_ids"].cu_seqlens.tolist()
    for case in (case for case in cases() if case[0] == ranks and case[3] == MODES[0]):
        for rank, rows in enumerate(deal(batch, case[1])):
            scored = four_ranks[rank]["forwards"][str(case)]
            assert len(scored) == len(rows)
            for row, found in zip(rows, scored, strict=True):
                for name, column in exact.items():
                    wanted = column[bounds[row] : bounds[row + 1]].tolist()
                    assert found[name] == pytest.approx(wanted, rel=1e-4, abs=1e-5)


def test_a_rank_without_a_finite_gradient_stops_the_step_of_all(four_ranks):
    for rank in range(2):
        norm, unchanged, unchanged_at_the_end = four_ranks[rank]["spoiled"]
        assert not math.isfinite(norm)
        assert unchanged and not unchanged_at_the_end


@pytest.fixture(scope="module")
def mesh():
    environment = dict(os.environ)
    join(Context("actor", 0, 1))
    yield data_parallel_mesh(CPU, 1)
    dist.destroy_process_group()
    os.environ.clear()
    os.environ.update(environment)


@pytest.fixture(scope="module")
def engine(mesh):
    return make_engine(mesh)


@given(budget=st.integers(LONGEST, 150), order=st.permutations(range(len(LENGTHS))))
@settings(max_examples=15)
def test_any_budget_and_order_gives_one_gradient(engine, plain, budget, order):
    engine.config.tokens_per_microbatch = budget
    found, metrics = update(engine, make_batch().take(order))
    gradient, expected = plain(MODES[0], CLIPPED)
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


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("checkpointing", [True, False])
def test_checkpointing_and_units_change_nothing(mesh, plain, monkeypatch, small, checkpointing):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 1 << 20 if small else 0)
    engine = make_engine(mesh, gradient_checkpointing=checkpointing, tokens_per_microbatch=60)
    assert_same_gradient(update(engine, make_batch())[0], plain(MODES[0], CLIPPED)[0])


def test_half_precision_computes_near_the_float32_master_weights(mesh, plain):
    engine = make_engine(mesh, dtype="bfloat16")
    found, metrics = update(engine, make_batch())
    gradient, expected = plain(MODES[0], CLIPPED)
    assert found.dtype == parameters(engine).dtype == torch.float32
    assert torch.cosine_similarity(found, gradient, dim=0) > 0.98
    assert metrics["entropy"] == pytest.approx(expected["entropy"], rel=0.05)


@pytest.mark.parametrize(("share", "kept"), [(0.0, 1.0), (0.25, 0.25), (3.0, 1.0)])
def test_clipping(mesh, plain, share, kept):
    """`max_grad_norm` as a share of the norm there is; 0 switches it off."""
    gradient, expected = plain(MODES[0], CLIPPED)
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
    gradient, expected = plain(MODES[0], CLIPPED)
    assert_same_gradient(found, gradient)
    assert_same_metrics(metrics, expected)


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
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=NAME)
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
    factors = [rate_factor(step, config, updates) for step in range(updates + warmup + 5)]
    assert 0 < factors[0] <= 1
    rise, fall = factors[:warmup], factors[warmup:]
    assert rise == sorted(rise) and fall == sorted(fall, reverse=True)
    assert not warmup or rise[-1] == 1
    assert all(least - 1e-9 <= factor <= 1 for factor in fall)
    if schedule == "constant":
        assert set(fall) == {1.0}
    else:
        last = max(updates - 1, warmup + 1)  # the fall takes one step at least
        assert factors[last:] == pytest.approx([least] * len(factors[last:]))


def test_biases_and_norms_do_not_decay():
    model = make_model()
    optimizer, _ = make_optimizer(model.parameters(), OptimizerConfig(weight_decay=0.1), 1)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    for group in optimizer.param_groups:
        assert all((p.ndim >= 2) == (group["weight_decay"] > 0) for p in group["params"])
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    assert held == len(list(model.parameters()))
