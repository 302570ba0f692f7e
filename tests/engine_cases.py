"""A tiny model and a batch, and what one update of them must give, however it is split."""

import itertools

import pytest
import torch
from small_models import SHAPE, build_seeded
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.algorithms import PolicyObjective, TokenSegments, token_weights
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.micro_batches import TokenColumns
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples

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
    config = Qwen2Config(**SHAPE, vocab_size=23, tie_word_embeddings=True)
    return build_seeded(AutoModelForCausalLM, config)


def make_batch(mode="token-mean"):
    """Every sample of the mini-batch, with all that an objective may read; holes in the mask."""
    generator = torch.Generator().manual_seed(0)
    responses = torch.tensor([0, *itertools.accumulate(n for _, n in LENGTHS)])
    tokens = int(responses[-1])

    def column(scale, shift=0.0):
        return RaggedColumn(scale * torch.randn(tokens, generator=generator) + shift, responses)

    mask = torch.rand(tokens, generator=generator) < 0.8
    weights = token_weights(
        mask, mode, length_norm=30, segments=TokenSegments.from_cu_seqlens(responses)
    )
    return Batch.from_columns(
        {
            "prompt_ids": [torch.randint(23, (n,), generator=generator) for n, _ in LENGTHS],
            "response_ids": [torch.randint(23, (n,), generator=generator) for _, n in LENGTHS],
            "response_mask": RaggedColumn(mask, responses),
            "loss_weights": RaggedColumn(weights, responses),
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
    columns = TokenColumns(batch, CPU)
    mask = columns["response_mask"].bool()
    segments = TokenSegments.from_cu_seqlens(samples.response_bounds, mask)
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
    found |= {"grad_norm": float(gradient.norm()), "skipped_updates": 0.0}
    return gradient, found


def make_engine(mesh, dtype="float32", optimizer=None, **settings):
    """An engine that learns nothing, unless it gets an optimizer's settings."""
    config = ActorConfig(**settings)
    engine = TrainEngine(CausalPolicy(make_model()), mesh, dtype, config)
    standing = OptimizerConfig(learning_rate=0.0, max_grad_norm=0.0)
    engine.start_optimizer(optimizer or standing, updates=1000)
    return engine


def update(engine, batch, objective=CLIPPED):
    """The whole gradient that the optimizer is given in one update, and the update's metrics."""
    gradients = []
    hook = engine.optimizer.register_step_pre_hook(
        lambda *_: gradients.append(flat(whole(p.grad) for p in engine.model.parameters()))
    )
    metrics = engine.update(batch, objective, temperature=TEMPERATURE)
    hook.remove()
    (gradient,) = gradients
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


def expectations():
    """Gives the gradient and metrics by mode and objective; each is worked out once."""
    known = {}

    def expected(mode, objective):
        key = (mode, objective.policy_loss)
        if key not in known:
            known[key] = plain_update(make_batch(mode), objective)
        return known[key]

    return expected
