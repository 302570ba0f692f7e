"""Build the training engine of a worker that holds a model, from settings."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hybridrl.checkpoint.tensors.file_plan import MAX_FILE_BYTES
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.config.schema import NF4_FORMAT, ActorConfig, LoraAdapterConfig
from hybridrl.controller import WorkerContext
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.engine.parallel_trial import check_parallel_equivalence
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.lora import ADAPTER_NAME, add_adapters, load_adapters
from hybridrl.models.model_loading import open_feature_model, open_model
from hybridrl.models.packed_models import CausalPolicy, FeatureModel, PackedModel, ScalarModel
from hybridrl.models.packing_trial import resolve_sample_layout
from hybridrl.parallel.process_group import ParallelMesh, join_group_world
from hybridrl.quantization.low_bit_linear import LowBitScoring
from hybridrl.quantization.nf4_base import quantize_base
from hybridrl.system.dtypes import DTYPES
from hybridrl.systems.low_bits.low_bit_training import enable_low_bit_training
from hybridrl.systems.low_bits.precision_plan import PrecisionPlan

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ModelSource:
    """A description of a model's files, tokenizer and precisions.

    Attributes:
        path: Model folder or hub name.
        tokenizer: Tokenizer folder or hub name.
        dtype: Precision of computation.
        context_length: Longest prompt and response together, in tokens.
        eos_token_ids: Tokens that end a response.
        save_dtype: Precision of the model in files; None: that of the files at `path`.
        file_bytes: Largest file, unless one tensor is larger.
        seed: Of adapters, which are new in it, and of sampling.
        adapters: Of those that go to what generates as they are; None: all weights go.
        precision: Which layers compute in fewer bits; None: none.
        template: What its chat template reads beside the messages.
    """

    path: str
    tokenizer: str
    dtype: str
    context_length: int
    eos_token_ids: tuple[int, ...]
    save_dtype: str | None = None
    file_bytes: int = MAX_FILE_BYTES
    seed: int = 0
    adapters: LoraAdapterConfig | None = None
    precision: PrecisionPlan | None = None
    template: TemplateContext = field(default_factory=TemplateContext)


def build_policy_engine(
    context: WorkerContext,
    source: ModelSource,
    config: ActorConfig,
    *,
    trains: bool = True,
    rollout_tp: int = 1,
) -> TrainEngine:
    """Join the process group, partition the language model, and read this rank's part. Collective.

    Args:
        rollout_tp: Ranks that share a copy while generating; see `build_training_mesh`.
    """
    model, files = open_model(source.path)
    if trains:
        _adapt(model, source, config)
    policy = CausalPolicy(model, resolve_sample_layout(model.config, source.path))
    return _build_engine(context, source, config, policy, files, trains, rollout_tp)


def build_scalar_engine(
    context: WorkerContext,
    source: ModelSource,
    config: ActorConfig,
    reads: Literal["before", "after"],
    *,
    trains: bool = True,
) -> TrainEngine:
    """Build an engine as `build_policy_engine` does, for a model with a scalar head; see
    `ScalarModel`. Collective."""
    model, files = open_model(source.path, scalar=True, needs_head=not trains)
    if trains:
        _adapt(model, source, config)
    scalar = ScalarModel(
        model, reads, resolve_sample_layout(model.config, source.path, scalar=True)
    )
    return _build_engine(context, source, config, scalar, files, trains, rollout_tp=1)


def build_feature_engine(
    context: WorkerContext, source: ModelSource, config: ActorConfig, features: int
) -> TrainEngine:
    """Build an engine as `build_scalar_engine` does, for a model that is trained and whose head has
    several outputs, of which the first is the scalar head of a model that has one. Collective."""
    model, files = open_feature_model(source.path, features, source.seed)
    _adapt(model, source, config)
    layout = resolve_sample_layout(model.config, source.path, scalar=True)
    widened = FeatureModel(model, "after", layout)
    return _build_engine(context, source, config, widened, files, trains=True, rollout_tp=1)


def _adapt(model: PreTrainedModel, source: ModelSource, config: ActorConfig) -> None:
    """Puts adapters into a model if they are what is trained."""
    if not config.lora.rank:
        return
    add_adapters(model, config.lora, source.seed)
    base = Path(source.path)  # other programs have other working folders
    model.peft_config[ADAPTER_NAME].base_model_name_or_path = (
        str(base.absolute()) if base.is_dir() else source.path
    )
    if config.lora.path is not None:
        load_adapters(model, config.lora.path)


def _build_engine(
    context: WorkerContext,
    source: ModelSource,
    config: ActorConfig,
    model: PackedModel,
    files: TensorReader | None,
    trains: bool,
    rollout_tp: int,
) -> TrainEngine:
    device = join_group_world(context)
    if not trains:
        model.requires_grad_(False)
        for parameter in model.parameters():  # what is only read need not be exact for a step
            parameter.data = parameter.data.to(DTYPES[source.dtype])
    cut = build_training_mesh(context.world_size, config.parallel, rollout_tp)
    if not trains:  # there are no gradients to sum, and weights never change
        still = replace(config.parallel, gradients="full", weights="full")
        config = replace(config, parallel=still)
    mesh = ParallelMesh(cut, device, config.parallel.shards, config.parallel.gradients)
    check_parallel_equivalence(model, source.path, mesh, config, source.dtype, trains=trains)
    scoring = None
    if (plan := source.precision) is not None:
        if plan.dtype != source.dtype:  # what model.dtype=auto comes to is known only now
            raise ConfigError(
                f"The plan of precision of `{context.role}` is for model.dtype={plan.dtype}, and "
                f"the job computes in {source.dtype}. Make the plan again, or set that."
            )
        bits = plan.of_rank(context.rank)
        if trains:
            enable_low_bit_training(model.inner, bits)
        else:
            scoring = LowBitScoring(model.inner, bits)
        if bits:  # kernels for 8 bits are no part of torch's compiler
            config = replace(config, compile="false")
    if trains and config.lora.rank and config.lora.base_format == NF4_FORMAT:
        quantize_base(model.inner, files, device)
        # A compiler might keep the weights that a forward has brought back for its backward.
        config = replace(config, compile="false")
    engine = TrainEngine(model, mesh, source.dtype, config, files)
    if scoring is not None:
        engine.forget_rounded = scoring.forget
    if trains and source.precision is not None:
        engine.rounding_seed = hash((source.seed, context.rank))
    return engine
