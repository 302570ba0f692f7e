"""Models cut over a mesh, against one process: what every kind of parallelism must not change."""

import torch
from engine_cases import CLIPPED, TEMPERATURE
from layout_cases import cut
from layout_cases import local as local_part
from small_models import SHAPE, build_seeded
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.parameter_layout import find_parameter_pieces, full_shape

ARCHITECTURES = {
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
    "llama": LlamaConfig,
    "qwen3_moe": Qwen3MoeConfig,
}
EXPERTS = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
LEARNING = OptimizerConfig(learning_rate=0.01)


def make_model(
    architecture="qwen2", key_value_heads=2, tied=True, layers=2, vocabulary=23, experts=6
):
    """The same tiny random model in every process."""
    own = {"num_hidden_layers": layers, "num_key_value_heads": key_value_heads}
    config = ARCHITECTURES[architecture](
        **(SHAPE | own),
        vocab_size=vocabulary,
        head_dim=4,
        tie_word_embeddings=tied,
        pad_token_id=0,
        **(EXPERTS | {"num_experts": experts} if architecture == "qwen3_moe" else {}),
    )
    return build_seeded(AutoModelForCausalLM, config)


def make_engine(mesh, model=None, optimizer=LEARNING, **settings):
    """An engine that keeps, of its first update, this rank's parts of the gradient."""
    policy = CausalPolicy(model or make_model())
    engine = TrainEngine(policy, mesh, "float32", ActorConfig(**settings))
    engine.start_optimizer(optimizer, updates=1000)

    def keep(*_):
        engine.first_gradient = parts(engine, lambda parameter: parameter.grad)
        kept.remove()

    kept = engine.optimizer.register_step_pre_hook(keep)
    return engine


def parts(engine, of=lambda parameter: parameter):
    """By name: the whole shape, the pieces that this rank holds, and what it has of them."""
    found = {}
    for name, parameter in engine.model.inner.named_parameters():
        parted = engine.cuts.get(name)
        value = of(parameter).detach()
        local = value.to_local() if isinstance(value, DTensor) else value
        pieces = find_parameter_pieces(name, parameter, parted)
        found[name] = full_shape(parameter, parted), pieces, local.clone()
    return found


def assemble(found):
    """Whole tensors of what all ranks hold; what several hold must be alike."""
    whole = {}
    for rank in found:
        for name, (shape, pieces, local) in rank.items():
            tensor = whole.setdefault(name, torch.full(shape, float("nan")))
            for piece in pieces:
                place, here = cut(tensor, piece.box), local_part(local, piece)
                known = ~place.isnan()
                torch.testing.assert_close(place[known], here[known], rtol=1e-5, atol=1e-6)
                place.copy_(here)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"nobody holds all of {name}"
    return whole


def assert_close(found, expected, tolerance):
    """Relative to the norm of each whole tensor of a size that matters."""
    assert found.keys() == expected.keys()
    total = torch.cat([t.flatten() for t in expected.values()]).norm()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).norm())
        assert error <= tolerance * max(float(tensor.norm()), 0.01 * float(total)), name


def learn(engine, batch, steps=20):
    """What an engine makes of a batch: outputs before, first gradient, curves, weights at last."""
    before = engine.forward(batch, temperature=TEMPERATURE)
    curve = [engine.update(batch, CLIPPED, temperature=TEMPERATURE) for _ in range(steps)]
    return {
        "before": before.to_pylist(),
        "gradient": engine.first_gradient,
        "curve": curve,
        "after": parts(engine),
    }
