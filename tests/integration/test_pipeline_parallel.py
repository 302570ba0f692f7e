"""Real gloo: a model in stages on several ranks learns what it learns in one process."""

import itertools
import math
import weakref
from dataclasses import dataclass, replace

import pytest
import torch
from engine_cases import (
    CLIPPED,
    CPU,
    LENGTHS,
    LONGEST,
    TEMPERATURE,
    WORLD,
    assert_same_metrics,
    deal,
    make_batch,
    whole,
)
from ranks import run_ranks
from torch.autograd.graph import saved_tensors_hooks
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
)

from hybridrl.algorithms import TokenLoss, value_loss
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ActorConfig, OptimizerConfig, ParallelConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.parallel import fsdp
from hybridrl.parallel.process_group import ParallelMesh

pytestmark = pytest.mark.more

LAYERS = 5
STEPS = 8
STANDING = OptimizerConfig(learning_rate=0.0, max_grad_norm=0.0)
LEARNING = OptimizerConfig(learning_rate=3e-3, max_grad_norm=0.5)
BUDGETS = [10_000, 60, LONGEST]
"""One micro-batch, fewer than the most stages, and more."""


@dataclass(frozen=True)
class Layout:
    dp: int
    pp: int
    chunks: int = 1

    @property
    def ranks(self):
        return self.dp * self.pp

    @property
    def config(self):
        return ParallelConfig(pp=self.pp, chunks=self.chunks)

    def __str__(self):
        return f"dp{self.dp}_pp{self.pp}_chunks{self.chunks}"


ONE = Layout(1, 1)
LAYOUTS = [Layout(1, 2), Layout(1, 2, 2), Layout(1, 4), Layout(2, 2), Layout(2, 2, 2)]
MODELS = ["qwen2 tied", "llama untied", "qwen2 critic"]
CASES = [
    *itertools.product(MODELS, [True], BUDGETS),
    (MODELS[0], False, LONGEST),
]
"""(model, whether it is one FSDP unit, budget) of every update."""


def learners(layout):
    """The models that take many steps."""
    return MODELS if layout in (ONE, Layout(1, 2, 2)) else MODELS[:1]


def make_model(name):
    """The same random model in every process."""
    config = (LlamaConfig if "llama" in name else Qwen2Config)(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        tie_word_embeddings="untied" not in name,
        num_labels=1,
    )
    critic = "critic" in name
    make = AutoModelForSequenceClassification if critic else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        inner = make.from_config(config, attn_implementation=PACKED_ATTENTION)
    inner.config.use_cache = False
    return ScalarModel(inner, "before") if critic else CausalPolicy(inner)


def critic_objective(outputs, columns, segments):
    """The old values and the returns are columns that happen to be there."""
    found = value_loss(
        outputs["values"], columns["log_probs"], columns["ref_log_probs"], 0.5, mask=segments.mask
    )
    return TokenLoss(*found)


def objective_of(name):
    """The loss of a model, and the options of its forward."""
    return (critic_objective, {}) if "critic" in name else (CLIPPED, {"temperature": TEMPERATURE})


def make_engine(name, layout, mesh, optimizer, dtype="float32", **settings):
    config = ActorConfig(parallel=layout.config, **settings)
    engine = TrainEngine(make_model(name), mesh, dtype, config)
    engine.start_optimizer(optimizer, STEPS)
    return engine


def one_update(engine, name, batch, budget):
    """Outputs, gradients by name, and metrics."""
    objective, options = objective_of(name)
    engine.config = replace(engine.config, tokens_per_microbatch=budget)
    scored = engine.forward(batch, **options).to_pylist()
    gradients = {}
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.update(
            {n: whole(p.grad).clone() for n, p in engine.model.inner.named_parameters()}
        )
    )
    metrics = engine.update(batch, objective, **options)
    hook.remove()
    return scored, gradients, metrics


def learn(engine, name, batch, folder):
    """Losses and gradient norms of some steps, and the parameters after them."""
    objective, options = objective_of(name)
    steps = [engine.update(batch, objective, **options) for _ in range(STEPS)]
    local = {n: whole(p).clone() for n, p in engine.model.inner.named_parameters()}
    everything = {n: p.clone() for n, p in engine.full_parameters()}
    engine.save(folder)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter.zero_()
    engine.load(folder)
    reloaded = all(torch.equal(p, everything[n]) for n, p in engine.full_parameters())
    return {
        "curve": [(step["loss"], step["grad_norm"]) for step in steps],
        "local": local,
        "everything": everything,
        "reloaded": reloaded,
    }


class Held:
    """A tensor that a backward is still to need; counted as long as it lives."""

    def __init__(self, tensor):
        self.tensor = tensor


def most_saved(engine, name, batch):
    """Largest number of tensors kept for backwards at any time of an update."""
    alive, most = weakref.WeakSet(), 0

    def keep(tensor):
        nonlocal most
        held = Held(tensor)
        alive.add(held)
        most = max(most, len(alive))
        return held

    objective, options = objective_of(name)
    with saved_tensors_hooks(keep, lambda held: held.tensor):
        engine.update(batch, objective, **options)
    assert not alive
    return most


def equal_batch(rows):
    """Rows of the same length, one for each micro-batch."""
    batch = make_batch()
    return Batch.concat([batch.take([LENGTHS.index((5, 20))])] * rows)


def rank_program(rank, folder):
    """What each of four processes does and finds; tests compare."""
    found = {}
    for layout in (ONE, *LAYOUTS):
        mesh = ParallelMesh(build_training_mesh(layout.ranks, layout.config), CPU)
        if rank >= layout.ranks:
            continue
        rows = deal(make_batch(), (6, 5) if layout.dp == 2 else (11,))[rank // layout.pp]
        batch = make_batch().take(rows)
        engines = {}
        for name, small, budget in CASES:
            if (name, small) not in engines:
                fsdp.SMALL_MODEL_BYTES = 1 << 20 if small else 0
                engines[name, small] = make_engine(name, layout, mesh, STANDING)
            done = one_update(engines[name, small], name, batch, budget)
            found[str(layout), name, small, budget] = done
        fsdp.SMALL_MODEL_BYTES = 1 << 20
        for name in learners(layout):
            checkpointing = layout.pp > 1 and "llama" in name
            engine = make_engine(
                name,
                layout,
                mesh,
                LEARNING,
                tokens_per_microbatch=60,
                gradient_checkpointing=checkpointing,
            )
            place = folder / f"{layout}_{name}".replace(" ", "_")
            found[str(layout), name, "learned"] = learn(engine, name, batch, place)
        engine = make_engine(MODELS[0], layout, mesh, STANDING, "bfloat16")
        found[str(layout), "half"] = one_update(engine, MODELS[0], batch, 60)
        engine = make_engine(MODELS[0], layout, mesh, STANDING, tokens_per_microbatch=25)
        found[str(layout), "saved"] = [
            most_saved(engine, MODELS[0], equal_batch(rows)) for rows in (1, 8)
        ]
    return found


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    """What each of four processes found."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(rank_program, folder, WORLD, folder)


def ranks_of(layout):
    """(rank, its dp place, its pp place)."""
    return [(rank, *divmod(rank, layout.pp)) for rank in range(layout.ranks)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_gradients_and_metrics_are_those_of_one_process(layout, four_ranks):
    for name, small, budget in CASES:
        _, wanted, wanted_metrics = four_ranks[0][str(ONE), name, True, 10_000]
        seen = set()
        scale = math.sqrt(sum(float(g.square().sum()) for g in wanted.values()))
        assert wanted_metrics["grad_norm"] == pytest.approx(scale, rel=1e-5)
        for rank, _, _ in ranks_of(layout):
            _, gradients, metrics = four_ranks[rank][str(layout), name, small, budget]
            seen |= gradients.keys()
            for parameter, gradient in gradients.items():
                error = float((gradient - wanted[parameter]).norm())
                assert error <= 1e-4 * float(wanted[parameter].norm()) + 1e-6 * scale
            assert_same_metrics(
                metrics, {n: v for n, v in wanted_metrics.items() if n != "learning_rate"}
            )
        assert seen == wanted.keys()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_outputs_of_the_last_stage_are_those_of_one_process(layout, four_ranks):
    dealt = deal(make_batch(), (6, 5) if layout.dp == 2 else (11,))
    order = deal(make_batch(), (11,))[0]
    for name, small, budget in CASES:
        wanted, _, _ = four_ranks[0][str(ONE), name, True, 10_000]
        for rank, dp, pp in ranks_of(layout):
            scored, _, _ = four_ranks[rank][str(layout), name, small, budget]
            assert len(scored) == len(dealt[dp])
            for row, found in zip(dealt[dp], scored, strict=True):
                for column, values in wanted[order.index(row)].items():
                    if pp == layout.pp - 1:
                        assert found[column] == pytest.approx(values, rel=1e-5, abs=1e-6)
                    else:
                        assert all(math.isnan(value) for value in found[column])


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_many_steps_are_those_of_one_process(layout, four_ranks):
    for name in learners(layout):
        wanted = four_ranks[0][str(ONE), name, "learned"]
        losses = [loss for loss, _ in wanted["curve"]]
        assert abs(losses[-1] - losses[0]) > 0.01
        copies = {}
        for rank, _, _ in ranks_of(layout):
            found = four_ranks[rank][str(layout), name, "learned"]
            for mine, theirs in zip(found["curve"], wanted["curve"], strict=True):
                assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-5)
            assert found["everything"].keys() == wanted["everything"].keys()
            for parameter, values in found["everything"].items():
                torch.testing.assert_close(
                    values, wanted["everything"][parameter], rtol=1e-3, atol=1e-4
                )
            for parameter, values in found["local"].items():
                copies.setdefault(parameter, []).append(values)
        # The tied embedding lies on two ranks, and the two never drift apart.
        shared = {name for name, values in copies.items() if len(values) > layout.dp}
        assert shared == ({"model.embed_tokens.weight"} if name.endswith(" tied") else set())
        for values in copies.values():
            assert all(torch.equal(values[0], other) for other in values)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_saved_stages_are_one_model_that_loads_again(layout, four_ranks):
    for name in learners(layout):
        for rank, _, _ in ranks_of(layout):
            assert four_ranks[rank][str(layout), name, "learned"]["reloaded"]


@pytest.mark.parametrize("layout", [one for one in LAYOUTS if one.chunks == 1], ids=str)
def test_a_stage_holds_activations_of_no_more_micro_batches_than_stages_follow(layout, four_ranks):
    for rank, _, pp in ranks_of(layout):
        of_one, of_eight = four_ranks[rank][str(layout), "saved"]
        assert of_one > 0 and of_eight == of_one * (layout.pp - pp)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_states_travel_in_the_precision_of_computation(layout, four_ranks):
    _, _, wanted = four_ranks[0][str(ONE), "half"]
    _, _, exact = four_ranks[0][str(ONE), MODELS[0], True, 60]
    assert wanted["loss"] != pytest.approx(exact["loss"], rel=1e-4)
    for rank, _, _ in ranks_of(layout):
        _, _, metrics = four_ranks[rank][str(layout), "half"]
        for name in ("loss", "entropy", "grad_norm"):
            assert metrics[name] == pytest.approx(wanted[name], rel=0.02)
