"""What every worker that holds the language model needs: the engine, built from settings."""

from __future__ import annotations

from dataclasses import dataclass

from hybridrl.config.schema import ActorConfig
from hybridrl.controller import Context
from hybridrl.engine import TrainEngine
from hybridrl.models import CausalPolicy, load_model
from hybridrl.parallel.process_group import data_parallel_mesh, join


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from.

    Attributes:
        path: Model folder or hub name.
        tokenizer: Tokenizer folder or hub name.
        dtype: Precision of computation.
        context_length: Longest prompt and response together, in tokens.
        eos_token_ids: Tokens that end a response.
    """

    path: str
    tokenizer: str
    dtype: str
    context_length: int
    eos_token_ids: tuple[int, ...]


def build_engine(context: Context, source: ModelSource, config: ActorConfig) -> TrainEngine:
    """Joins the process group, loads the model and shards it. Collective."""
    device = join(context)
    model = load_model(source.path, "float32")
    mesh = data_parallel_mesh(device, context.world_size)
    return TrainEngine(CausalPolicy(model), mesh, device, source.dtype, config)
