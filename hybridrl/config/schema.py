"""Every setting of a job, typed, with its default and its unit. One place per fact.

A *prompt* is a question, a *sample* is one answer to it, a *token* is a token. What can be derived
(samples per step, context length, devices) is derived, and printed at the start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class RunConfig:
    """Where the run leaves its files."""

    name: str = "grpo"
    root: str = "runs"
    """Folder of all runs; this one becomes `<root>/<date>-<name>`."""
    directory: str | None = None
    """An explicit folder instead."""
    seed: int = 0
    dry: bool = False
    """Only check the settings and print the resolved configuration."""


@dataclass
class RayConfig:
    """How to reach Ray."""

    address: str | None = None
    """`auto`, `host:port` or `ray://host:port` joins a cluster; null starts one on this machine."""
    start_timeout_s: float = 120.0
    """Longest wait for the cluster to give the devices."""


@dataclass
class ControllerConfig:
    """The single controller."""

    timeout_s: float = 1800.0
    """Longest time one call may run on a worker."""


@dataclass
class TinyModelConfig:
    """Shape of the model that is made from `run.seed` when `model.path` is null."""

    hidden_size: int = 128
    layers: int = 2
    heads: int = 4
    context: int = 128


@dataclass
class ModelConfig:
    """The language model to train."""

    path: str | None = None
    """Folder or hub name; null makes a tiny model and a character tokenizer."""
    tokenizer: str | None = None
    """Where the tokenizer lies, if not with the model."""
    dtype: str = "float32"
    """Precision of computation; master weights and optimizer are float32."""
    tiny: TinyModelConfig = field(default_factory=TinyModelConfig)


@dataclass
class DataConfig:
    """The prompts, examples or preference pairs."""

    task: str | None = None
    """A built-in task, or null to read `path`."""
    path: str | None = None
    """JSONL or Parquet file, folder or glob; or the name of a data set on the hub."""
    split: str | None = None
    """Of a data set on the hub (null: `train`), or of a folder with a file for each split."""
    eval_path: str | None = None
    """Held-out prompts; null holds out `eval.prompts` rows of `path`."""
    eval_split: str | None = None
    prompt_column: str | None = "prompt"
    """Text, or a list of chat messages; null for preference pairs whose answers are conversations
    that hold the prompt."""
    answer_column: str | None = "answer"
    """Passed to the reward function; null if there is none."""
    response_column: str = "response"
    """Supervised fine-tuning: what to answer, text or chat messages."""
    messages_column: str | None = None
    """Supervised fine-tuning: whole conversations, of which the assistant's turns are learned; null
    reads `prompt_column` and `response_column`."""
    chosen_column: str = "chosen"
    """Preference pairs: the better answer, text or chat messages that end with it."""
    rejected_column: str = "rejected"
    """Preference pairs: the worse answer."""
    margin_column: str | None = None
    """Preference pairs: how much better the chosen answer is; null: 0 for all."""
    chat: bool | None = None
    """Whether prompts go through the chat template; null: when they are chat messages."""
    system_prompt: str | None = None
    max_prompt_tokens: int = 1024
    max_response_tokens: int | None = None
    """Longest response of the data, its end included (supervised fine-tuning, preference pairs);
    null: any."""
    too_long: str = "error"
    """What to do with longer rows: `error` or `drop`."""
    prompts_per_step: int = 64
    shuffle: bool = True


@dataclass
class JudgeConfig:
    """A language model that grades answers, beside the functions."""

    path: str | None = None
    """Folder or hub name; null: no judge."""
    template: str | None = None
    """A text file in which `{prompt}`, `{response}`, `{answer}` and any other column of the data
    stand for their values; null: a general one."""
    pattern: str = r"[Ss]core:\s*(-?[0-9.]+)"
    """Where the grade stands in what the judge writes: the regex's group, at its last match."""
    scale: float = 10.0
    """The best grade; grades are divided by it."""
    max_tokens: int = 256
    context: int = 4096
    """Longest template with its values, and what the judge writes, in tokens."""
    weight: float = 1.0


@dataclass
class RewardConfig:
    """What is reinforced."""

    function: Any = "exact"
    """A built-in one (`exact`, `numeric`, `contains`, `boxed`, `math`, `format`, `length`),
    `path/to/file.py:name`, `package.module:name`; or a list."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the functions, by their names:
    `reward.options.format.pattern='<think>.*</think>.*'`."""
    weights: list[float] | None = None
    """One per function; null weighs all 1."""
    model: str | None = None
    """A reward model (a sequence-classification folder or hub name), beside the functions."""
    model_weight: float = 1.0
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    processes: int = 1
    """Processes per device that run the functions."""
    timeout_s: float = 30.0
    """Longest time for one sample."""
    on_error: str = "fail"
    """A function that raises, hangs or returns nonsense: `fail` ends the job, `drop` leaves the
    sample out of the update, `value` scores it `error_value`."""
    error_value: float = 0.0
    correct_at: float = 1.0
    """A sample counts as correct, for accuracy, from this score on."""


@dataclass
class CostConfig(RewardConfig):
    """What is to stay below a limit, for `safe_rlhf`: scored as rewards are."""

    limit: float = 0.0
    """Mean cost that is allowed."""
    multiplier: float = 1.0
    """First weight of the cost against the reward."""
    multiplier_rate: float = 0.1
    """Learning rate of the logarithm of the multiplier."""


@dataclass
class OptimizerConfig:
    """AdamW."""

    learning_rate: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
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


@dataclass
class ActorConfig:
    """How the model is trained: the policy, or with trainer `reward_model` the reward model. A
    critic is trained alike, but for what `critic` says."""

    tokens_per_microbatch: int = 16384
    """Tokens, prompts included, of one forward and backward on one device."""
    updates_per_step: int = 1
    """Optimizer updates on the samples of one step, each on its own part of them."""
    gradient_checkpointing: bool = False
    offload_parameters: bool = False
    """Keep parameters, gradients and optimizer state on the CPU (GPUs only)."""
    offload_optimizer: bool = False
    """Keep the optimizer state on the CPU between updates (GPUs only)."""
    offload_between_calls: bool = False
    """Roles that share a device take its memory in turns: what a role keeps moves to the CPU while
    others work (GPUs only)."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)


@dataclass
class CriticConfig:
    """The value model of `ppo` and `safe_rlhf`. What is not said here is as for the actor."""

    path: str | None = None
    """A reward model or language model to start from; null: the actor's."""
    learning_rate: float | None = None
    """null: the actor's."""
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
    verify_weights: bool = False
    """Compare all weights of the generator with the trainer's after each sync; slow."""


@dataclass
class AlgorithmConfig:
    """The objective; names are those of `hybridrl.algorithms`."""

    advantage: str = "group_relative"
    """For `grpo`: `group_relative`, `leave_one_out`, `optimal_reward_baseline`, `pass_at_k`,
    `reinforce_plus_plus` or `reinforce_plus_plus_baseline`."""
    advantage_scale: str = "std"
    """`std`, `batch` or `none`, of the estimators that know it."""
    gamma: float = 1.0
    """Discount of later rewards."""
    lam: float = 1.0
    """Of generalised advantage estimation."""
    policy_loss: str = "ppo_clip"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    loss_options: dict[str, float] = field(default_factory=dict)
    """Further options of the policy loss, such as `tau_positive` of `sapo`."""
    aggregation: str = "token-mean"
    """`token-mean`, `seq-mean-token-mean`, `seq-mean-token-sum`, `seq-mean-token-sum-norm`,
    `token-sum`."""
    kl_coefficient: float = 0.0
    """Weight of the KL to the reference; 0 needs no reference model."""
    kl_estimator: str = "k3"
    kl_in_reward: bool = False
    """Take the KL off the rewards instead of adding it to the loss."""
    kl_target: float | None = None
    """With `kl_in_reward`: adapt the coefficient until the KL is this; null keeps it."""
    kl_horizon: float = 10000.0
    """Samples over which the coefficient adapts."""
    entropy_coefficient: float = 0.0
    correction: str = "none"
    """For the gap between trainer and rollout engine: `truncate` or `mask` importance weights."""
    correction_level: str = "token"
    """`token` or `sequence`."""
    correction_low: float | None = None
    """Smallest weight that `mask` keeps."""
    correction_high: float | None = 2.0
    """Largest weight."""
    dynamic_sampling: bool = False
    """Replace prompts whose samples all score alike, which teach nothing, by others (DAPO)."""
    max_refills: int = 4
    """Generations that a step may add to its first for that."""
    overlong_buffer: int = 0
    """Tokens before `rollout.max_tokens` over which a penalty grows (DAPO); 0: no penalty."""
    overlong_factor: float = 1.0
    ptx_coefficient: float = 0.0
    """Weight of a supervised loss on the data's own answers, in a step of its own (`ppo`,
    `safe_rlhf`)."""


@dataclass
class PreferenceConfig:
    """Learning from pairs: trainers `dpo` and `reward_model`."""

    loss: str = "sigmoid"
    """Of `dpo`: `sigmoid` or `ipo`."""
    beta: float = 0.1
    """Of `dpo`: how hard the policy is held to the reference."""
    length_normalised: bool = False
    """Of `dpo`: mean instead of sum over the tokens of an answer."""
    nll_coefficient: float = 0.0
    """Of `dpo`: weight of the chosen answer's negative log-likelihood, which keeps it from becoming
    less likely together with the rejected one; 1 is usual."""
    centre: float = 0.0
    """Of `reward_model`: weight of the square of a pair's scores, which keeps them around 0."""


@dataclass
class PlacementConfig:
    """Which role lives on which devices; `placement=<name>` chooses a strategy. It never changes
    what is learned, but for `staleness`."""

    strategy: str = "flattening"
    """`flattening`, `interleaving`, `separation`, `explicit`, `file`, or a function of yours:
    `path/to/file.py:name`; see `hybridrl.placement`."""
    path: str | None = None
    """For `file`: a placement.json, as every run leaves one."""
    roles: dict[str, Any] = field(default_factory=dict)
    """By role (`actor`, `generator`, `critic`, `reference`, `reward` ...): its `devices` in rank
    order (for `explicit`), its `share` of them (for `interleaving`), or how its model is cut, if
    not as the actor's: `placement.roles.reference.parallel.tp=2`."""
    generation_devices: int | None = None
    """For `separation`: how many devices generate; null: half of them."""
    scoring: str = "generation"
    """For `separation`: on which side the roles live that only score, `generation` or
    `training`."""
    staleness: int = 0
    """Where generation has its own devices: how many steps the samples' policy may be behind. 0 is
    strictly on-policy; with 1 the next samples are generated while the last ones are learned."""
    in_flight: bool = False
    """Where generation has its own devices: give it new weights between two tokens, without waiting
    for the samples under way; they go on with the new weights."""
    transport: str = "auto"
    """How weights reach devices that only generate: `collective`, `store` (Ray's object store), or
    `auto`: collective wherever both sides can meet (`staleness` up to 1)."""


@dataclass
class WarmupConfig:
    """Supervised steps before reinforcement, on a built-in task's own answers."""

    steps: int = 0
    examples_per_step: int = 256
    learning_rate: float = 1e-3


@dataclass
class EvalConfig:
    """Greedy answers to held-out prompts."""

    every: int = 20
    """Steps between evaluations; 0: only before the first step and after the last."""
    prompts: int = 256
    samples: int = 1
    """k of mean@k and pass@k, measured besides when it is more than 1."""
    by_column: str | None = None
    """A column of the data, such as `source`: accuracy is also shown for each of its values."""


@dataclass
class TrainerConfig:
    """The driver program."""

    name: str = "grpo"
    """A module of `hybridrl.trainers`."""
    steps: int = 100


@dataclass
class ObserveConfig:
    """What is written and shown."""

    samples_every: int = 10
    """Steps between two tables in `samples/`; 0: none."""
    show_every: int = 10
    """Steps between two samples on the console; 0: none."""
    timeline_every: int = 0
    """Steps between two timelines in `timelines/`: a picture, and a trace for Perfetto, of what
    each device did in the step and the one before; 0: none."""


@dataclass
class Config:
    """A whole job."""

    run: RunConfig = field(default_factory=RunConfig)
    devices: str = "auto"
    """`cpu`, `cuda`, or `auto`: every GPU, or two CPU slots where there is none."""
    num_devices: int | None = None
    """null: every GPU; two CPU slots (one with `executor=inline`)."""
    executor: str = "ray"
    """`ray`, or `inline`: one device, in the driver's process, without Ray."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    metrics: Any = None
    """Besides `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, or a list of them."""
    ray: RayConfig = field(default_factory=RayConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    preference: PreferenceConfig | None = None
    """Set by `algorithm=dpo` and `algorithm=reward_model`."""
    cost: CostConfig | None = None
    """Set by `algorithm=safe_rlhf`."""
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
