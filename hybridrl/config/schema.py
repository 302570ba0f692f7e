"""The schema of a job: every setting with its type, default and unit.

What is learned stands in `objective_schema` and `preference_schema`, the data in `data_schema`, the
models in `model_schema`, generation and environments in `rollout_schema`, evaluations in
`eval_schema`, all else here, where the whole is put together and imported from. Beside a type
stands what its values may be (`constraints`).

A *prompt* is a question, a *sample* is it with one response, a *token* is a token. What can be
derived (samples per step, context length, devices) is derived, and printed at the start.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    LearningRate,
    NameOrPath,
    NonNegativeFloat,
    NonNegativeInt,
    NumberRange,
    OneOf,
    OneOrMoreOf,
    PositiveFloat,
    PositiveInt,
    Seconds,
    programs,
)
from hybridrl.config.data_schema import DataConfig
from hybridrl.config.eval_schema import EvalConfig, EvalSetConfig, EvalStopConfig
from hybridrl.config.model_schema import (
    CHECKPOINTING_MODES,
    FULL_FORMAT,
    NF4_FORMAT,
    ActorConfig,
    CriticConfig,
    LoraAdapterConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    TinyModelConfig,
)
from hybridrl.config.objective_schema import (
    SAMPLED,
    WARMED_UP,
    AlgorithmConfig,
    CostConfig,
    DistillationConfig,
    ExpertIterationConfig,
    JudgeConfig,
    RewardConfig,
)
from hybridrl.config.preference_schema import MetaConfig, PreferenceConfig
from hybridrl.config.rollout_schema import (
    LOSSY_WEIGHT_SYNCS,
    WITH_SEPARATE_GENERATOR,
    EnvironmentConfig,
    RolloutConfig,
    RolloutParallelConfig,
    is_served,
)

_WITH_ROLE_PLACEMENT = AppliesIf("placement.strategy=explicit", "placement.strategy=interleaving")
PREFERENCES = AppliesIf(*programs("dpo", "online_dpo", "reward_model", "kto"))
_WITH_CHECKPOINTS = AppliesIf("checkpoint.every", "checkpoint.every_minutes", "checkpoint.best")
_WITH_RAY = AppliesIf("executor=ray")


CLOSE_TIMEOUT_S = 8.0
"""How long workers and Ray may take to end after a signal."""


@dataclass
class RunConfig:
    """The run's name, folder and seed."""

    name: NameOrPath = "grpo"
    """Part of the folder's name, and the run's name in trackers; the algorithm's if not set."""
    root: NameOrPath = "runs"
    """Folder of all runs; this one becomes `<root>/<date>-<name>`."""
    directory: NameOrPath | None = None
    """An explicit folder instead."""
    seed: Annotated[int, NumberRange(least=0, most=2**32 - 1)] = 0
    """Of the tiny model, the order of the data, the held-out rows, adapters and all sampling."""
    dry: bool = False
    """Run every check of a start that needs no workers, print the resolved settings, and end."""
    private: bool = False
    """Keep other users of the machine out of the run's folder, and of all that this job writes."""


@dataclass
class RayConfig:
    """The connection to Ray."""

    address: Annotated[NameOrPath | None, _WITH_RAY] = None
    """`auto`, `host:port` or `ray://host:port` joins a cluster; `local` starts one on this machine;
    null joins that of the environment variable RAY_ADDRESS, and starts one where it is not set."""
    start_timeout_s: Annotated[Seconds, _WITH_RAY] = 120.0
    """Longest wait for the cluster to give the devices."""


@dataclass
class ControllerConfig:
    """Timeouts of the single controller."""

    timeout_s: Annotated[Seconds, _WITH_RAY] = 1800.0
    """Longest time one call may run on a worker."""
    heartbeat_s: Annotated[Seconds, _WITH_RAY] = 60.0
    """A worker process that does not answer for so long while it has a call to do is named on the
    console; the job goes on."""


@dataclass
class PlacementConfig:
    """The placement of roles on devices; `placement=<name>` chooses a strategy. Only `staleness`
    and `in_flight` change what is learned."""

    strategy: NameOrPath = "flattening"
    """`flattening`, `interleaving`, `separation`, `auto` (what a search finds to be quickest here),
    `explicit`, `file`, or a function of yours:
    `path/to/file.py:name`; see `hybridrl.placement`."""
    path: Annotated[NameOrPath | None, AppliesIf("placement.strategy=file")] = None
    """For `file`: a placement.json, as every run leaves one."""
    lengths: Annotated[NameOrPath | None, AppliesIf("placement.strategy=auto")] = None
    """For `auto`: tokens of a usual prompt and response, `300+800`, with the longest response of a
    step, `300+800..4096`; or the folder of a run whose samples were as long; null: as long as they
    may be."""
    roles: Annotated[dict[str, Any], _WITH_ROLE_PLACEMENT] = field(default_factory=dict)
    """By role (`actor`, `generator`, `critic`, `reference`, `reward` ...): its `devices` in rank
    order (for `explicit`), or its `share` of them (for `interleaving`)."""
    generation_devices: Annotated[PositiveInt | None, WITH_SEPARATE_GENERATOR] = None
    """For `separation`: how many devices generate; null: half of them."""
    scoring: Annotated[str, OneOf("generation", "training"), WITH_SEPARATE_GENERATOR] = "generation"
    """For `separation`: on which side the roles live that only score, `generation` or
    `training`."""
    staleness: Annotated[NonNegativeInt, WITH_SEPARATE_GENERATOR] = 0
    """Where generation has its own devices: how many steps the samples' policy may be behind. 0 is
    strictly on-policy; with 1 the next samples are generated while the last ones are learned."""
    in_flight: Annotated[bool, WITH_SEPARATE_GENERATOR] = False
    """Where generation has its own devices: give it new weights between two tokens, without waiting
    for the samples under way; they go on with the new weights."""
    transport: Annotated[str, OneOf("auto", "collective", "store"), WITH_SEPARATE_GENERATOR] = (
        "auto"
    )
    """How weights reach devices that only generate: `collective`, `store` (Ray's object store), or
    `auto`: collective wherever both sides can meet (`staleness` up to 1)."""


@dataclass
class WarmupConfig:
    """Supervised steps before reinforcement learning, on the reference answers of a built-in
    task."""

    steps: NonNegativeInt = 0
    """Updates before reinforcement begins; 0: none."""
    examples_per_step: Annotated[PositiveInt, AppliesIf("warmup.steps")] = 256
    """Prompts with their answers that an update learns from."""
    learning_rate: Annotated[LearningRate, AppliesIf("warmup.steps")] = 1e-3
    """In place of `actor.optimizer.learning_rate`."""


@dataclass
class TrainerConfig:
    """The driver program and its number of steps."""

    name: NameOrPath = "grpo"
    """A module of `hybridrl.trainers`, or a class of yours: `path/to/file.py:Name`."""
    steps: PositiveInt = 100
    """Each generates for `data.prompts_per_step` prompts and learns from them."""
    epochs: Annotated[PositiveFloat | None, AppliesIf("trainer.epochs")] = None
    """Passes over the training rows, in place of `steps`, which follows from them: 0.5 is half of
    the rows; null: as many as `steps` makes."""

    @property
    def known_steps(self) -> float:
        """The number of steps; with `epochs`, before the number of rows is known, no bound."""
        return self.steps if self.epochs is None else math.inf


@dataclass
class CheckpointConfig:
    """The schedule, location and retention of checkpoints; see docs/checkpoints.md."""

    every: NonNegativeInt = 0
    """Steps between two checkpoints; there is one after the last step, too. 0: none for that
    reason."""
    every_minutes: NonNegativeFloat | None = 0.0
    """Minutes after which the next step is saved, if no other was; 0: none for that reason; null:
    as many as waste least, by what the last checkpoint has cost and how often devices fail."""
    keep_last: Annotated[PositiveInt, _WITH_CHECKPOINTS] = 2
    """So many of the newest stay; older ones are removed."""
    keep_every: Annotated[NonNegativeInt, _WITH_CHECKPOINTS] = 0
    """Steps that are multiples of it are never removed; 0: no such steps."""
    best: NameOrPath | None = None
    """A figure of the evaluations, such as `accuracy`, or `-eval/loss` where less is better: a step
    that is better than all before it is saved, and stays."""
    folder: Annotated[NameOrPath | None, _WITH_CHECKPOINTS] = None
    """Where the steps are instead of in the run's `checkpoints/`: a folder, or a URL that fsspec
    knows (`s3://bucket/run-7`)."""
    asynchronous: Annotated[bool, _WITH_CHECKPOINTS] = True
    """Write a copy of the state while the next steps go on; false: wait until it is written, which
    saves the memory for the copy, 12 bytes of the host for each parameter that a device trains."""
    memory_copies: Annotated[NonNegativeInt, _WITH_CHECKPOINTS] = 0
    """Keep the newest checkpoint in the memory of nodes, too: what a device writes on its own node
    and on so many others. After a loss of a worker, or of as many nodes, it is read from there. 0:
    nowhere."""

    @property
    def wanted(self) -> bool:
        """True if any setting saves checkpoints."""
        return bool(self.every or self.every_minutes != 0 or self.best)


@dataclass
class RecoveryConfig:
    """The recovery of a job with checkpoints from a lost worker, host or node, and its end after
    SIGTERM; see docs/checkpoints.md."""

    max_restarts: Annotated[NonNegativeInt, _WITH_CHECKPOINTS] = 3
    """So many times in a row, without a new checkpoint between them, its workers are started again
    and it goes on from the newest checkpoint. 0: it ends with the error."""
    min_devices: Annotated[PositiveInt | None, _WITH_CHECKPOINTS] = None
    """Where fewer devices come back: go on with as few as these; null: with all or not at all."""
    wait_s: Annotated[NonNegativeFloat, _WITH_CHECKPOINTS] = 300.0
    """Longest wait for all devices to come back."""
    grace_s: Seconds = 30.0
    """Time between SIGTERM, SIGHUP or Ctrl-C and the end of the process: what is in hand is
    finished and saved if that can be done meanwhile."""

    @property
    def save_s(self) -> float:
        """The seconds of the grace period for saving; the rest is for stopping workers."""
        return max(self.grace_s / 2, self.grace_s - CLOSE_TIMEOUT_S)


@dataclass
class GuardConfig:
    """The guard against non-finite losses, gradients and scores, and against suspicious rewards;
    see docs/troubleshooting.md."""

    on_nan: Annotated[str, OneOf("skip", "stop", "rewind")] = "skip"
    """`skip`: the update is left out; `stop`: the job ends; `rewind`: it goes back to the last
    checkpoint, and leaves out the prompts that led there when they come again."""
    most_skipped: Annotated[
        int, NumberRange(least=1, most=20, why="After so many in a row the engine itself gives up.")
    ] = 10
    """So many such updates in a row, or rewinds to one checkpoint, end the job."""
    most_mismatch: PositiveFloat | None = None
    """The job ends if the generator is further from the trainer in its first step (`mismatch/k3`);
    null: 1e-4 in float32, 0.05 in bfloat16, 0.1 with `rollout.quantization`,
    `rollout.kv_cache=fp8`, a `rollout.plan` of fewer bits or `models.actor.precision`, and no limit
    where `rollout.weight_sync` brings weights roughly."""

    tripwires: Annotated[NonNegativeInt | None, AppliesIf("guard.tripwires", "reward.check")] = None
    """Watch for a reward that rises while measures that are not rewarded fall (evaluations,
    `reward.check`), and for a policy that repeats itself: windows of so many steps are compared. 0:
    do not; null: 20 with `reward.check`, else 0."""
    on_tripwire: Annotated[
        str, OneOf("warn", "stop"), AppliesIf("guard.tripwires", "reward.check")
    ] = "warn"
    """`warn`: tell of it; `stop`: the job ends, with its model saved."""


@dataclass
class ObserveConfig:
    """The records of a running job: samples, console samples and timelines."""

    samples_every: NonNegativeInt = 10
    """Steps between two tables in `samples/`; 0: none."""
    show_every: NonNegativeInt = 10
    """Steps between two samples on the console; 0: none."""


CACHED_KINDS = ("log_probs", "verdicts", "judgements")


@dataclass
class CacheConfig:
    """The cache of values that are expensive to compute, and of the token ids of large files, which
    runs share; see docs/data.md."""

    use: Annotated[list[Annotated[str, OneOf(*CACHED_KINDS)]], AppliesIf("cache.use")] = field(
        default_factory=list
    )
    """What is cached: `log_probs` of a reference that does not learn; `verdicts` of reward
    functions that have an attribute `cache`, as `passes_tests` has; `judgements` of a judge."""
    folder: Annotated[NameOrPath | None, AppliesIf("cache.use", "cache.folder")] = None
    """Where it lies; null: `$XDG_CACHE_HOME/hybridrl`, or `~/.cache/hybridrl`."""
    max_gib: Annotated[PositiveFloat, AppliesIf("cache.use")] = 8.0
    """Size of all entries on disk but token ids; the oldest are removed beyond it."""


@dataclass
class Config:
    """The settings of a whole job."""

    run: RunConfig = field(default_factory=RunConfig)
    devices: Annotated[str, OneOf("auto", "cpu", "cuda")] = "auto"
    """`cpu`, `cuda`, or `auto`: every GPU, or two CPU slots where there is none."""
    num_devices: PositiveInt | None = None
    """null: every GPU; two CPU slots (one with `executor=inline`)."""
    resources: Annotated[str, OneOf("fixed", "auto"), AppliesIf("resources=auto")] = "fixed"
    """The cores of what works at the same time, such as generation, rewards and environments:
    `fixed`: all share all; `auto`: after the first steps, which are measured, each gets cores of
    its own where that makes steps quicker. Nothing that is learned depends on it."""
    executor: Annotated[str, OneOf("ray", "inline")] = "ray"
    """`ray`, or `inline`: one device, in the driver's process, without Ray."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    metrics: Annotated[Any, OneOrMoreOf("tensorboard", "wandb", "mlflow", "trackio", "jsonl")] = (
        None
    )
    """Besides `metrics.jsonl`: `tensorboard`, `wandb`, `mlflow`, `trackio`, or a list of them."""
    ray: RayConfig = field(default_factory=RayConfig)
    controller: ControllerConfig = field(default_factory=ControllerConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    models: dict[str, Any] = field(default_factory=dict)
    """By role, what is another than for the actor: the `path` of its model, how it is cut
    (`models.reference.parallel.tp=2`), its optimizer (`models.critic.optimizer.learning_rate`), and
    for actor, reference and reward models a file of `hybridrl plan precision`, which says what
    layers each rank computes in fewer bits (`models.actor.precision=FILE`; docs/precision.md)."""
    data: DataConfig = field(default_factory=DataConfig)
    reward: Annotated[RewardConfig, SAMPLED] = field(default_factory=RewardConfig)
    actor: ActorConfig = field(default_factory=ActorConfig)
    rollout: Annotated[RolloutConfig, SAMPLED] = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    preference: Annotated[PreferenceConfig | None, PREFERENCES] = None
    """Set by `algorithm=dpo`, `algorithm=online_dpo` and `algorithm=reward_model`."""
    meta: Annotated[MetaConfig | None, AppliesIf("trainer.name=meta_reward_model")] = None
    """Set by `algorithm=meta_reward_model`."""
    expert: Annotated[ExpertIterationConfig | None, AppliesIf("trainer.name=expert_iteration")] = (
        None
    )
    """Set by `algorithm=expert_iteration`."""
    distillation: Annotated[
        DistillationConfig | None,
        AppliesIf("trainer.name=distillation", "trainer.name=offline_distillation"),
    ] = None
    """Set by `algorithm=distillation` and `algorithm=offline_distillation`."""
    cost: Annotated[CostConfig | None, AppliesIf("trainer.name=safe_rlhf")] = None
    """Set by `algorithm=safe_rlhf`."""
    warmup: Annotated[WarmupConfig, WARMED_UP, AppliesIf("data.task")] = field(
        default_factory=WarmupConfig
    )
    eval: EvalConfig = field(default_factory=EvalConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    observe: ObserveConfig = field(default_factory=ObserveConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    recover: RecoveryConfig = field(default_factory=RecoveryConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    resume: NameOrPath | None = None
    """What to go on from, with its settings where no other is given: the folder of a run (its
    newest checkpoint) or one of its step folders; or `auto`: the newest checkpoint in
    `run.directory`, and the beginning where there is none."""
    fork: NameOrPath | None = None
    """What a new run begins from, with its settings where no other is given: a run or a step, as
    for `resume`. The old run stays as it is. With `resume=auto` it counts only while the new run
    has no checkpoint of its own."""
