"""Settings of the models: where they come from, how they are cut and trained, how they generate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class TinyModelConfig:
    """Shape of the model that is made from `run.seed` when `model.path` is null."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128
    experts: int = 0
    """Of each layer, two of which take a token; 0: layers are dense."""


@dataclass
class ModelConfig:
    """The language model to train."""

    path: str | None = None
    """Folder or hub name; null makes a tiny model and a character tokenizer."""
    tokenizer: str | None = None
    """Where the tokenizer lies, if not with the model."""
    dtype: str = "auto"
    """Precision of computation: `bfloat16`, `float32`, or `auto`: bfloat16 on accelerators, and on
    CPUs that multiply it from 8 million parameters on, else float32. Master weights and optimizer
    are float32. The run's `config.yaml` has the one that was chosen."""
    save_dtype: str | None = None
    """Precision of trained models in files; null: that of the folder that the model comes from.
    Checkpoints and adapters are float32."""
    file_gib: float = 5.0
    """Largest file of a model or a checkpoint, unless one tensor is larger, GiB."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    moments: str = "float32"
    """Precision in which both moments are kept between steps, which compute in float32: `float32`,
    or `bfloat16`, which halves their memory and loses updates of the second one below 0.4 %."""
    weight_decay: float = 0.0
    warmup_steps: int = 0
    schedule: str = "constant"
    """`constant`, `linear` or `cosine`, down to `min_ratio` of the rate at the last step."""
    min_ratio: float = 0.0
    max_grad_norm: float = 1.0


@dataclass
class LoraSettings:
    """Low-rank adapters instead of the whole model; see `hybridrl.models.adapters`."""

    rank: int | None = None
    """null trains the whole model."""
    alpha: float = 32.0
    """Adapters are multiplied by alpha / rank."""
    targets: Any = "all-linear"
    """Modules that get one: `all-linear`, or a list of names such as `[q_proj, v_proj]`."""


@dataclass
class ParallelConfig:
    """How a model that is trained is cut over the devices: dp x ring x ulysses x pp x tp of them.
    Splits never change what is learned."""

    dp: int | None = None
    """Parts of the batch; null: as many as the devices leave."""
    tp: int = 1
    """Tensor parallel: every matrix is cut over so many devices."""
    pp: int = 1
    """Pipeline: consecutive layers lie on different devices."""
    chunks: int = 1
    """Stages on each device of a pipeline; more than one interleaves them: less idle time, more
    messages."""
    ulysses: int = 1
    """Sequence parallel by heads: samples are cut over so many devices, which swap tokens for heads
    in attention."""
    ring: int = 1
    """Sequence parallel by blocks: keys and values are passed around so many devices."""
    shards: int | None = None
    """Data- and sequence-parallel ranks that share one copy of the parameters; null: all of them.
    Fewer gather over shorter ways and take more memory (hybrid sharding)."""


CHECKPOINTING = ("none", "selective", "full", "offload")
"""What `actor.gradient_checkpointing` may be."""


@dataclass
class ActorConfig:
    """How the model is trained: the policy, or with trainer `reward_model` the reward model. Other
    models are trained alike, but for what `models.<role>` says."""

    tokens_per_microbatch: int = 16384
    """Tokens, prompts included, of one forward and backward on one device."""
    updates_per_step: int = 1
    """Optimizer updates on the samples of one step, each on its own part of them."""
    router_loss_weight: float = 0.0
    """Of the auxiliary loss that keeps a mixture of experts in balance, see
    `hybridrl.models.routing`; with it an update forwards its samples once more. 0: none."""
    gradient_checkpointing: str = "none"
    """What a layer does not keep of its forward is computed again in its backward. `none`: it keeps
    all; `selective`: results of matrix products and attention; `full` (or `true`): its input only;
    `offload`: that too, on the CPU."""
    compile: str = "auto"
    """Compile layers with torch: `true`, `false`, or `auto`: on accelerators. What does not compile
    runs as it is, and the log says so."""
    offload_parameters: bool = False
    """Keep parameters, gradients and optimizer state on the CPU (GPUs only)."""
    offload_optimizer: bool = False
    """Keep the optimizer state on the CPU; an optimizer step brings that of a layer at a time, the
    next one's while one is stepped (GPUs only)."""
    offload_between_calls: bool = False
    """Roles that share a device take its memory in turns: what a role keeps moves to the CPU when
    another one, or its own generator, is to work (GPUs only)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __post_init__(self) -> None:
        said = str(self.gradient_checkpointing).lower()
        self.gradient_checkpointing = {"true": "full", "false": "none"}.get(said, said)
        self.compile = str(self.compile).lower()


@dataclass
class CriticConfig:
    """How `ppo` and `safe_rlhf` learn values. The critic's model begins as the actor's, or as
    `models.critic.path` says: a reward model or a language model."""

    value_clip: float | None = None
    """Farthest that an update may move a value; null does not clip."""
    warmup_steps: int = 0
    """First steps, in which only the critic learns."""


@dataclass
class RolloutParallelConfig:
    """How the model is cut while it generates."""

    tp: int = 1
    """Devices that share one copy of the model."""


@dataclass
class RolloutConfig:
    """How samples are generated."""

    engine: str = "vllm"
    samples_per_prompt: int = 8
    max_tokens: int = 512
    """Longest response."""
    min_tokens: int = 0
    """Shortest response: the end-of-sequence token is not chosen before."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches it off."""
    stop: list[str] = field(default_factory=list)
    """Texts that end a response; the tokenizer's end-of-sequence token always does."""
    episode: str | None = None
    """`path/to/file.py:Name` or `package.module:Name`: a class whose objects answer the model's
    turns, see `hybridrl.Episode`. Then `max_tokens` and `min_tokens` are those of all turns
    together, `stop` texts end a turn, and `reward.function=[]` leaves rewards to the episode."""
    max_turns: int = 8
    """Most turns of the model in an episode."""
    max_turn_tokens: int | None = None
    """Longest of these turns; null: as long as `max_tokens` allows. A turn that is cut short ends
    its episode."""
    tool_timeout_s: float = 30.0
    """Longest time for one call of the episode's code; then that episode is over."""
    parallel: RolloutParallelConfig = field(default_factory=RolloutParallelConfig)
    max_sequences: int = 256
    """Samples generated at a time on one replica."""
    kv_cache_gib: float = 0.25
    """KV cache per device (CPUs)."""
    memory_share: float = 0.5
    """Share of a GPU's memory for the engine: its weights and KV cache."""
    cuda_graphs: bool = True
    routing_replay: bool = False
    """Of a mixture of experts: the trainer lets each token be taken by the experts that took it in
    generation (Ma et al. 2025, arXiv:2510.11370), with the weights that its own router gives them.
    Rounding alone would choose others now and then. A byte for each of them and each token."""
    engine_options: dict[str, Any] = field(default_factory=dict)
    """Further options of vLLM's engine by vLLM's names, such as `max_num_batched_tokens`,
    `kv_cache_dtype`, `async_scheduling` or `speculative_config`."""
    adapters: str = "merged"
    """How the adapters of `actor.lora` get to vLLM: `merged` into the weights, which all travel; or
    `separate`, so that they alone travel, and vLLM computes with both: less time for each sync and
    more for each token."""
    verify_weights: bool = False
    """Compare all weights of the generator with the trainer's after each sync; slow."""
