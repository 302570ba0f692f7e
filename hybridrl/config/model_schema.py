"""The schema of models: sources, training, parallelism."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    LearningRate,
    ListLength,
    NameOrNames,
    NameOrPath,
    NonNegativeFloat,
    NonNegativeInt,
    NotEmpty,
    NumberRange,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProperFraction,
    programs,
)
from hybridrl.config.objective_schema import REINFORCED, VALUES

_WITH_TINY_MODEL = AppliesIf("model.path=null")
ON_GPUS = AppliesIf("devices=auto", "devices=cuda")
_DECAYING_SCHEDULES = ("linear", "cosine", "wsd", "inverse_sqrt")
AUTO_SCHEDULE = "auto"
SCHEDULES = ("constant", *_DECAYING_SCHEDULES, AUTO_SCHEDULE)
"""What `actor.optimizer.schedule` may be."""
_WITH_DECAYING_SCHEDULE = AppliesIf(*(f"actor.optimizer.schedule={s}" for s in _DECAYING_SCHEDULES))
_WITH_AUTO = AppliesIf(f"actor.optimizer.schedule={AUTO_SCHEDULE}")
_WITH_WSD_OR_AUTO = AppliesIf(*(f"actor.optimizer.schedule={s}" for s in ("wsd", AUTO_SCHEDULE)))
_WITH_OPTIONS = AppliesIf("actor.optimizer.name=muon", "actor.optimizer.name=adafactor")
_WITH_MOMENTS = AppliesIf("actor.optimizer.name=adamw", "actor.optimizer.name=muon")
WITH_LORA = AppliesIf("actor.lora.rank")
FULL_FORMAT, NF4_FORMAT = "full", "nf4"
"""What `actor.lora.base_format` may be."""


@dataclass
class TinyModelConfig:
    """The shape of the tiny model that is made from `run.seed` if `model.path` is null."""

    hidden_size: Annotated[int, NumberRange(least=1, most=65536), _WITH_TINY_MODEL] = 128
    """A multiple of 32 for each head."""
    layers: Annotated[int, NumberRange(least=1, most=1000), _WITH_TINY_MODEL] = 2
    """Transformer blocks."""
    heads: Annotated[int, NumberRange(least=1, most=1024), _WITH_TINY_MODEL] = 4
    """Of attention; half as many of keys and values."""
    context: Annotated[int, NumberRange(least=1, most=2**24), _WITH_TINY_MODEL] = 128
    """Longest sample, prompt included, in tokens."""
    experts: Annotated[int, NumberRange(least=0, most=4096), _WITH_TINY_MODEL] = 0
    """Of each layer, two of which take a token; 0: layers are dense."""


@dataclass
class ModelConfig:
    """The model to start from, or the shape of a tiny one, and its precision."""

    path: NameOrPath | None = None
    """Folder or hub name; null makes a tiny model and a character tokenizer."""
    tokenizer: NameOrPath | None = None
    """Where the tokenizer lies, if not with the model."""
    dtype: Annotated[str, OneOf("auto", "float32", "bfloat16", "float16")] = "auto"
    """Precision of computation: `bfloat16`, `float32`, or `auto`: bfloat16 on GPUs, and on
    CPUs that multiply it from 8 million parameters on, else float32. Master weights and optimizer
    are float32. The run's `config.yaml` has the one that was chosen."""
    save_dtype: Annotated[str, OneOf("float32", "bfloat16", "float16")] | None = None
    """Precision of trained models in files; null: that of the folder that the model comes from.
    Checkpoints and adapters are float32."""
    file_gib: PositiveFloat = 5.0
    """Largest file of a model or a checkpoint, unless one tensor is larger, GiB."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass
class OptimizerConfig:
    """The optimizer and its learning rate."""

    name: NameOrPath = "adamw"
    """`adamw`; `muon`, orthogonalised steps for the matrices of layers and AdamW for all others;
    `adafactor`, which remembers rows and columns only; or `path/to/file.py:Class`, a
    `torch.optim.Optimizer` of yours. See docs/algorithms.md."""
    options: Annotated[dict[str, Any], _WITH_OPTIONS] = field(default_factory=dict)
    """Further arguments of the optimizer by name: of Muon `momentum`, `nesterov` and
    `ns_steps`; of Adafactor `beta2_decay` and `d`; of a class of yours its own."""
    learning_rate: LearningRate = 1e-6
    """At its highest, after warm-up. Of Adafactor a share of a tensor's own size."""
    betas: Annotated[
        list[Annotated[float, NumberRange(least=0, below=1)]], ListLength(2), _WITH_MOMENTS
    ] = field(default_factory=lambda: [0.9, 0.95])
    """AdamW's decay of the mean of gradients, and of their squares."""
    moments: Annotated[str, OneOf("float32", "bfloat16", "int8"), _WITH_MOMENTS] = "float32"
    """Precision in which moments are kept between steps, which compute in float32: `float32`;
    `bfloat16`, which halves their memory and loses updates of the second one below 0.4%; or `int8`,
    those of matrices in a quarter (Dettmers et al. 2021, arXiv:2110.02861)."""
    weight_decay: NonNegativeFloat = 0.0
    """Share of each weight that is taken off in a step, times the learning rate."""
    warmup_steps: NonNegativeInt = 0
    """Updates over which the rate grows from 0."""
    schedule: Annotated[str, OneOf(*SCHEDULES)] = "constant"
    """`constant`; `linear` or `cosine`, down to `min_ratio` of the rate at the last step; `wsd`,
    which stays and falls linearly over the last `decay_share` of the updates (Hu et al. 2024,
    arXiv:2404.06395); `inverse_sqrt`, with the root of the updates since the warm-up, never
    below `min_ratio`; or `auto`, of programs that learn from given data: rates are found while
    training, in place of `learning_rate` and `warmup_steps`; see docs/algorithms.md."""
    min_ratio: Annotated[Probability, _WITH_DECAYING_SCHEDULE] = 0.0
    """Of the highest learning rate, at the last step."""
    decay_share: Annotated[ProperFraction | None, _WITH_WSD_OR_AUTO] = None
    """Share of the updates over which `wsd` falls, and `auto`, which falls to 0. null: 0.1 for
    `wsd` and 0.4 for `auto`."""
    learning_rate_range: Annotated[list[LearningRate], ListLength(2), _WITH_AUTO] = field(
        default_factory=lambda: [1e-5, 1e-1]
    )
    """Lowest and highest rate that `auto` tries."""
    stage_steps: Annotated[PositiveInt | None, _WITH_AUTO] = None
    """Steps of the first stage of `auto`; each has one rate and is twice as long as the one before,
    up to 8 times the first. null: a sixteenth of `trainer.steps`."""
    trial_rates: Annotated[PositiveInt, _WITH_AUTO] = 8
    """Rates that the first stage tries, each for a tenth of the stage's steps; later stages compare
    one other rate with that of the stage before. These steps are among those of `trainer.steps`."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Longer gradients are scaled down to it; 0: none are."""

    @property
    def falling_share(self) -> float:
        """The share of the updates over which the rate of `wsd` and `auto` falls."""
        return self.decay_share or (0.4 if self.schedule == AUTO_SCHEDULE else 0.1)


@dataclass
class LoraAdapterConfig:
    """Low-rank adapters instead of the whole model; see `hybridrl.models.lora`."""

    rank: PositiveInt | None = None
    """null trains the whole model."""
    alpha: Annotated[PositiveFloat, WITH_LORA] = 32.0
    """Adapters are multiplied by alpha / rank."""
    targets: Annotated[Any, NameOrNames(), NotEmpty(), WITH_LORA] = "all-linear"
    """Modules that get one: `all-linear`, or a list of names such as `[q_proj, v_proj]`."""
    path: Annotated[NameOrPath | None, WITH_LORA] = None
    """Adapters to continue from: the folder of a LoRA run, of one of its steps, or one that peft
    saved. Rank, alpha and targets are theirs, `model.path` is by default the model that they belong
    to, and the reference keeps them as they are there. null: new adapters."""
    base_format: Annotated[str, OneOf(FULL_FORMAT, NF4_FORMAT), WITH_LORA] = FULL_FORMAT
    """Format of the frozen weights of the linear layers below the adapters, the reference's too:
    `full`, float32; or `nf4`, 4 bits (QLoRA, Dettmers et al. 2023, arXiv:2305.14314), 0.52 bytes
    for each of them on each device. Embeddings, heads and experts stay as they are."""


_GRADIENT_ENCODINGS = ("full", "bfloat16", "int8", "two_level_int4", "auto")
"""What `actor.parallel.gradients` may be."""
_WEIGHT_ENCODINGS = ("full", "int4_difference")
"""What `actor.parallel.weights` may be."""


@dataclass
class ParallelConfig:
    """The cut of a trained model over its devices: dp x ring x ulysses x pp x tp. Splits never
    change what is learned; `gradients` and `weights` do unless they are `full`."""

    dp: PositiveInt | None = None
    """Parts of the batch; null: as many as the devices leave."""
    tp: PositiveInt = 1
    """Tensor parallel: every matrix is cut over so many devices."""
    pp: PositiveInt = 1
    """Pipeline: consecutive layers lie on different devices."""
    chunks: Annotated[PositiveInt, AppliesIf(".pp>1")] = 1
    """Stages on each device of a pipeline; more than one interleaves them: less idle time, more
    messages."""
    ulysses: PositiveInt = 1
    """Sequence parallel by heads: samples are cut over so many devices, which swap tokens for heads
    in attention."""
    ring: PositiveInt = 1
    """Sequence parallel by blocks: keys and values are passed around so many devices."""
    shards: PositiveInt | None = None
    """Data- and sequence-parallel ranks that share one copy of the parameters (hybrid sharding):
    fewer gather over shorter ways and take more memory. null: all of them; of the actor on several
    nodes of known GPUs those of a node, if by the plan a step is quicker and memory has room."""
    gradients: Annotated[str, OneOf(*_GRADIENT_ENCODINGS)] = "full"
    """How gradients travel while they are summed over the ranks that share parameters: `full` in
    float32; `bfloat16` in half the bytes, each sum rounded to it; `int8` in about 4 times fewer;
    `two_level_int4`: within a node so, then between nodes in 7.5 times fewer; `auto`: for each unit
    what is measured to be quickest, of all but `bfloat16`. These others are added up in float32.
    For slow links; see docs/precision.md."""
    weights: Annotated[str, OneOf(*_WEIGHT_ENCODINGS)] = "full"
    """How weights travel when they are gathered from the ranks that share them: `full`, in the
    precision of computation, each time; or `int4_difference`: once after each update, what it has
    changed, in 4 bits, to a copy that every rank keeps. For slow links; see docs/precision.md."""


CHECKPOINTING_MODES = ("none", "selective", "block", "full", "offload")
"""What `actor.gradient_checkpointing` may be, from what takes most memory to what takes least."""


@dataclass
class ActorConfig:
    """The training of the policy, or of the reward model with trainer `reward_model`. Other models
    are trained in the same way except for what `models.<role>` sets."""

    tokens_per_microbatch: PositiveInt | None = 16384
    """Tokens, prompts included, of one forward and backward on one device; a prompt that samples
    share counts once. null: as many as its memory has room for, by the plan."""
    updates_per_step: PositiveInt = 1
    """Optimizer updates on the samples of one step, each on its own part of them; in each epoch."""
    epochs: Annotated[PositiveInt, AppliesIf(*REINFORCED.conditions, *programs("distillation"))] = 1
    """How often the policy goes through the samples of a step, each time in another order."""
    max_kl: Annotated[
        PositiveFloat | None,
        REINFORCED,
        AppliesIf("actor.epochs>1", "actor.updates_per_step>1"),
    ] = None
    """Largest KL divergence within a step, in nats a token: an update, other than the first, that
    finds the policy further from where the step began is left out, with the rest of the step. null:
    no limit."""
    router_loss_weight: Annotated[NonNegativeFloat, AppliesIf(".router_loss_weight")] = 0.0
    """Of the auxiliary loss that keeps a mixture of experts in balance, see
    `hybridrl.models.expert_routing`; with it an update forwards its samples once more. 0: none."""
    share_prefixes: Annotated[
        str,
        OneOf("auto", "true", "false"),
        AppliesIf(".share_prefixes=true", ".share_prefixes=false"),
    ] = "auto"
    """Compute a prompt once for its samples in a micro-batch, in updates and in scoring: `true`,
    `false`, or `auto`: where the model can do so and it spares a tenth of the samples' tokens, 64
    or more. The results are the same; see docs/models.md."""
    gradient_checkpointing: Annotated[str, OneOf("auto", *CHECKPOINTING_MODES)] = "auto"
    """What a layer does not keep of its forward is computed again in its backward. `none`: it keeps
    all; `selective`: results of matrix products and attention; `block`: those of attention; `full`
    (or `true`): its input only; `offload`: that too, on the CPU; `auto`: the first of these, but
    for `offload`, for which there is memory, by the plan."""
    compile: Annotated[str, OneOf("auto", "true", "false")] = "auto"
    """Compile layers with torch: `true`, `false`, or `auto`: on GPUs, from 67 million parameters
    on. What does not compile runs as it is, and the log says so."""
    offload_parameters: Annotated[bool, ON_GPUS] = False
    """Keep parameters, gradients and optimizer state on the CPU (GPUs only)."""
    offload_optimizer: Annotated[bool, ON_GPUS] = False
    """Keep the optimizer state on the CPU; an optimizer step brings that of a layer at a time, the
    next one's while one is stepped (GPUs only)."""
    offload_between_calls: Annotated[bool, ON_GPUS] = False
    """Roles that share a device take its memory in turns: what a role keeps moves to the CPU when
    another one, or its own generator, is to work (GPUs only)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraAdapterConfig = field(default_factory=LoraAdapterConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        said = str(self.gradient_checkpointing).lower()
        self.gradient_checkpointing = {"true": "full", "false": "none"}.get(said, said)
        self.compile = str(self.compile).lower()
        self.share_prefixes = str(self.share_prefixes).lower()

    @property
    def step_updates(self) -> int:
        """The number of updates of a step, unless `max_kl` ends it early."""
        return self.epochs * self.updates_per_step


@dataclass
class CriticConfig:
    """The training of the critic in `ppo` and `safe_rlhf`. It starts from the actor's model, or
    from `models.critic.path`: a reward model or a language model."""

    value_clip: Annotated[PositiveFloat | None, VALUES] = None
    """Farthest that an update may move a value; null does not clip."""
    warmup_steps: Annotated[NonNegativeInt, VALUES] = 0
    """First steps, in which only the critic learns: the policy has its learning-rate schedule, and
    updates of `algorithm.ptx_coefficient`, behind them."""
    epochs: Annotated[PositiveInt | None, VALUES, AppliesIf(".epochs")] = None
    """How often the critic goes through the samples of a step; null: as often as the policy."""
