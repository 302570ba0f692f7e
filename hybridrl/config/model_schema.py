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
    Seconds,
)

_WITH_TINY_MODEL = AppliesIf("model.path=null")
ON_GPUS = AppliesIf("devices=auto", "devices=cuda")
ON_CPUS = AppliesIf("devices=auto", "devices=cpu")
VALUES = AppliesIf("trainer.name=ppo", "trainer.name=safe_rlhf")
_REINFORCES = tuple(f"trainer.name={name}" for name in ("grpo", "ppo", "remax", "safe_rlhf"))
_WITH_VLLM = AppliesIf("rollout.engine=vllm")
_WITH_PIPELINE_ENGINE = AppliesIf("rollout.engine=pipeline")
SERVED = AppliesIf("rollout.serve", "environment.name")
_WITH_EPISODE = AppliesIf("rollout.episode")
_WITH_TURNS = AppliesIf("rollout.episode", "rollout.serve", "environment.name")
_WITH_PARTIAL = AppliesIf("rollout.partial")
_BY_REWARDS = AppliesIf(*(f"trainer.name={name}" for name in ("grpo", "ppo", "safe_rlhf")))
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
WITH_SEPARATE_GENERATOR = AppliesIf(
    *(f"placement.strategy={name}" for name in ("separation", "explicit", "file", "auto"))
)
FULL_FORMAT, NF4_FORMAT = "full", "nf4"
"""What `actor.lora.base_format` may be."""
LOSSY_WEIGHT_SYNCS = ("int8", "int4_delta")
"""Ways of `rollout.weight_sync` by which the generator's weights are not quite the trainer's."""
_WITH_LOSSY_SYNC = AppliesIf(*(f"rollout.weight_sync={name}" for name in LOSSY_WEIGHT_SYNCS))


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
    decay_share: Annotated[ProperFraction, _WITH_WSD_OR_AUTO] = 0.1
    """Share of the updates over which `wsd` falls, and `auto`, which falls to 0."""
    learning_rate_range: Annotated[list[LearningRate], ListLength(2), _WITH_AUTO] = field(
        default_factory=lambda: [1e-5, 1e-1]
    )
    """Lowest and highest rate that `auto` tries."""
    stage_steps: Annotated[PositiveInt | None, _WITH_AUTO] = None
    """Steps of the first stage of `auto`; each has one rate and is twice as long as the one before,
    up to 8 times the first. null: a sixteenth of `trainer.steps`."""
    trial_rates: Annotated[PositiveInt, _WITH_AUTO] = 8
    """Rates that the first stage tries, each for a tenth of the stage's steps; later stages try
    half as many. These steps are among those of `trainer.steps`."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Longer gradients are scaled down to it; 0: none are."""


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
    epochs: Annotated[PositiveInt, AppliesIf(*_REINFORCES, "trainer.name=distillation")] = 1
    """How often the policy goes through the samples of a step, each time in another order."""
    max_kl: Annotated[
        PositiveFloat | None,
        AppliesIf(*_REINFORCES),
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


@dataclass
class RolloutParallelConfig:
    """The parallel layout of the model while it generates."""

    tp: Annotated[PositiveInt, _WITH_VLLM] = 1
    """Devices that share one copy of the model."""
    pp: Annotated[PositiveInt, _WITH_PIPELINE_ENGINE] = 1
    """Devices that share one copy of the model layer by layer: as many as `rollout.plan` has
    stages."""

    @property
    def ranks(self) -> int:
        """The number of devices that share one copy of the model."""
        return self.tp * self.pp


@dataclass
class RolloutConfig:
    """The generation of samples: engine, sampling parameters, episodes and weight sync."""

    engine: Annotated[str, OneOf("vllm", "transformers", "pipeline")] = "vllm"
    """What generates, as `rollout=<name>` chooses it."""
    samples_per_prompt: PositiveInt = 8
    """Answers that are drawn for each prompt."""
    max_tokens: PositiveInt = 512
    """Longest response."""
    min_tokens: NonNegativeInt = 0
    """Shortest response: the end-of-sequence token is not chosen before."""
    temperature: Annotated[
        float,
        NumberRange(
            least=0.01,
            most=100,
            why="Near 0 all samples of a prompt would be equal and nothing could be learned. "
            "Evaluation is greedy by itself.",
        ),
    ] = 1.0
    """Of drawing, which the trainer's log-probabilities of samples follow; those of responses that
    the data brings are at 1."""
    top_p: Annotated[float, NumberRange(above=0, most=1)] = 1.0
    """Share of the probability that tokens are drawn from; 1: all of it. With this and the next two
    the trainer computes log-probabilities and entropy among the tokens that were left, which the
    generator notes for each place: see docs/algorithms.md."""
    top_k: NonNegativeInt = 0
    """So many of the likeliest tokens are drawn from; 0: all."""
    min_p: Annotated[Probability, AppliesIf(".min_p")] = 0.0
    """Tokens are drawn from that have at least this share of the likeliest one's probability."""
    stop: list[Annotated[str, NotEmpty()]] = field(default_factory=list)
    """Texts that end a response; the end tokens of model, tokenizer and chat template always do."""
    episode: NameOrPath | None = None
    """`path/to/file.py:Name` or `package.module:Name`: a class whose objects answer the model's
    turns, see `hybridrl.Episode`. Then `max_tokens` and `min_tokens` are those of all turns
    together, `stop` texts end a turn, and `reward.function=[]` leaves rewards to the episode."""
    max_turns: Annotated[PositiveInt, _WITH_EPISODE] = 8
    """Most turns of the model in an episode."""
    max_turn_tokens: Annotated[PositiveInt | None, _WITH_TURNS] = None
    """Longest of these turns; null: as long as `max_tokens` allows. A turn that is cut short ends
    its episode, but for one that an environment plays."""
    tool_timeout_s: Annotated[Seconds, _WITH_EPISODE] = 30.0
    """Longest time for one call of the episode's code; then that episode is over."""
    serve: Annotated[bool, SERVED] = False
    """Open an HTTP endpoint on each replica that speaks as OpenAI's does, for programs that are not
    started by the job: rows of the data wait for them. With `environment.name` there is one
    anyway. See docs/environments.md."""
    serve_host: Annotated[NameOrPath, SERVED] = "127.0.0.1"
    """The address that it listens at. Any other than this machine's own is open to the network,
    for those who have its token."""
    serve_port: Annotated[int, NumberRange(least=0, most=65535), SERVED] = 0
    """Of the first replica, the others have those that follow; 0: any that are free."""
    parallel: RolloutParallelConfig = field(default_factory=RolloutParallelConfig)
    max_sequences: PositiveInt = 256
    """Samples generated at a time on one replica."""
    kv_cache_gib: Annotated[PositiveFloat, _WITH_VLLM, ON_CPUS] = 0.25
    """KV cache per device (CPUs)."""
    memory_share: Annotated[ProperFraction | None, _WITH_VLLM, ON_GPUS] = None
    """Share of a GPU's memory for the engine: its weights and KV cache; null: by the plan, all that
    other roles leave free while samples are generated, but for 5%."""
    kv_cache: Annotated[str, OneOf("auto", "bf16", "fp8"), _WITH_VLLM, ON_GPUS] = "auto"
    """Precision of the KV cache (GPUs only): `auto`, that of `model.dtype`, or of the model's
    folder where it says so; `bf16`; or `fp8`, in half the memory, so that more samples run at once.
    They are then samples of a policy of fewer bits, as with `quantization`."""
    quantization: Annotated[str, OneOf("none", "int8", "fp8"), _WITH_VLLM] = "none"
    """In how many bits linear layers compute while samples are drawn, and those of evaluations:
    those of `model.dtype`, or 8: `int8` (CPUs, GPUs before Blackwell) or `fp8` (GPUs since Ada).
    The weights are rounded when they come, after each update; see docs/precision.md."""
    plan: Annotated[NameOrPath | None, _WITH_PIPELINE_ENGINE] = None
    """A file of `hybridrl plan generation`: which layers each device generates with, in how many
    bits; null: as many for each, in `model.dtype`. See docs/precision.md."""
    max_kl: Annotated[PositiveFloat, _WITH_PIPELINE_ENGINE] = 0.01
    """Most nats a token by which a plan's fewer bits may put the generator off the trainer."""
    cuda_graphs: Annotated[bool, _WITH_VLLM, ON_GPUS] = True
    """Record the generator's kernels once and play them back (GPUs only)."""
    routing_replay: Annotated[bool, _WITH_VLLM] = False
    """Of a mixture of experts: the trainer lets each token be taken by the experts that took it in
    generation (Ma et al. 2025, arXiv:2510.11370), with the weights that its own router gives them.
    Rounding alone would choose others now and then. A byte for each of them and each token."""
    partial: Annotated[ProperFraction | None, _WITH_PARTIAL, _BY_REWARDS] = None
    """Share of the prompts being answered whose samples must all be complete before a step goes
    on; the other prompts are kept, and their samples continue in the next step with its weights.
    Their tokens then come from several policies, for which `algorithm.correction` corrects. null: a
    step waits for all samples. See docs/placement.md."""
    partial_steps: Annotated[PositiveInt, _WITH_PARTIAL] = 4
    """Most generations after its first over which a sample may extend; the last waits for it."""
    engine_options: Annotated[dict[str, Any], _WITH_VLLM] = field(default_factory=dict)
    """Further options of vLLM's engine by vLLM's names, such as `max_num_batched_tokens`,
    `async_scheduling` or `speculative_config`."""
    adapters: Annotated[str, OneOf("merged", "separate"), WITH_LORA] = "merged"
    """How the adapters of `actor.lora` get to vLLM: `merged` into the weights, which all travel; or
    `separate`, so that they alone travel, and vLLM computes with both: less time for each sync and
    more for each token."""
    verify_weights: Annotated[bool, AppliesIf(".verify_weights")] = False
    """Compare all weights of the generator with the trainer's after each sync; slow."""
    weight_sync: Annotated[
        str, OneOf("auto", "full", "delta", *LOSSY_WEIGHT_SYNCS), WITH_SEPARATE_GENERATOR
    ] = "auto"
    """What travels when the generator has devices of its own and gets new weights: `full`, all of
    them; `delta`, what has changed, exactly; `auto`, `full` within a node, and between nodes
    whichever of these takes less time, measured; or roughly, which `mismatch/` shows and
    `algorithm.correction` corrects: `int8`, the weights in 8 bits; `int4_delta`, what has changed
    in 4. All but `full` take a copy of the weights in the memory of the host, on each side."""
    weight_sync_refresh: Annotated[NonNegativeInt, _WITH_LOSSY_SYNC] = 0
    """Each so many syncs all weights travel exactly; 0: never, or with `int4_delta` the
    first time only. They are counted from each checkpoint on."""
