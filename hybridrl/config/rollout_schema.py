"""The schema of generation, and of environments: programs that play episodes and score them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    NameOrPath,
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
from hybridrl.config.model_schema import ON_GPUS, WITH_LORA
from hybridrl.config.objective_schema import PER_TURN, WITH_TURNS

_WITH_VLLM = AppliesIf("rollout.engine=vllm")
_WITH_PIPELINE_ENGINE = AppliesIf("rollout.engine=pipeline")
SERVED = AppliesIf("rollout.serve", "environment.name")
_WITH_EPISODE = AppliesIf("rollout.episode")
_WITH_PARTIAL = AppliesIf("rollout.partial")
WITH_SEPARATE_GENERATOR = AppliesIf(
    *(f"placement.strategy={name}" for name in ("separation", "explicit", "file", "auto"))
)
LOSSY_WEIGHT_SYNCS = ("int8", "int4_delta")
"""Ways of `rollout.weight_sync` by which the generator's weights are not quite the trainer's."""
_WITH_LOSSY_SYNC = AppliesIf(*(f"rollout.weight_sync={name}" for name in LOSSY_WEIGHT_SYNCS))
ON_CPUS = AppliesIf("devices=auto", "devices=cpu")
_WITH_ENVIRONMENT = AppliesIf("environment.name")
_WITH_ENDPOINT = AppliesIf("environment.name", "rollout.serve")


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
    max_turn_tokens: Annotated[PositiveInt | None, WITH_TURNS] = None
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
    partial: Annotated[ProperFraction | None, _WITH_PARTIAL, PER_TURN] = None
    """Share of the prompts being answered whose samples must all be complete before a step goes
    on; the other prompts are kept, and their samples continue in the next step with its weights.
    Their tokens then come from several policies, and the ratios of the loss weigh them. null: a
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
    whichever of these takes less time, measured; or roughly, which `mismatch/` shows and the
    ratios of the loss correct: `int8`, the weights in 8 bits; `int4_delta`, what has changed in 4.
    All but `full` take a copy of the weights in the memory of the host, on each side."""
    weight_sync_refresh: Annotated[NonNegativeInt, _WITH_LOSSY_SYNC] = 0
    """Each so many syncs all weights travel exactly; 0: never, or with `int4_delta` the
    first time only. They are counted from each checkpoint on."""


@dataclass
class EnvironmentConfig:
    """The environment that plays each row of the data, in processes of its own."""

    name: Annotated[NameOrPath | None, _WITH_ENVIRONMENT] = None
    """A built-in adapter (`verifiers`, `gymnasium`, `openenv`, `mcp`, `command`), or a function of
    yours, `path/to/file.py:name`; null: none. See docs/environments.md."""
    options: Annotated[dict[str, Any], _WITH_ENVIRONMENT] = field(default_factory=dict)
    """Keyword arguments of the adapter or function."""
    python: Annotated[NameOrPath | None, _WITH_ENVIRONMENT] = None
    """The Python that runs it: that of a virtual environment with the packages that it needs; null:
    the one that runs the job."""
    env: Annotated[list[str], _WITH_ENVIRONMENT] = field(default_factory=list)
    """Environment variables with secrets that it gets, by name or pattern (`OPENAI_API_KEY`,
    `AWS_*`). It starts without all others: RAY_*, *_KEY, *_TOKEN, *_SECRET, *PASSWORD* and such."""
    hidden_columns: Annotated[list[str], AppliesIf("environment.name=command")] = field(
        default_factory=lambda: ["answer", "tests"]
    )
    """Columns of the data that programs do not get, for they may run what the model wrote."""
    processes: Annotated[PositiveInt, _WITH_ENVIRONMENT] = 1
    """Processes per replica that generates."""
    episodes: Annotated[PositiveInt, _WITH_ENVIRONMENT] = 64
    """Episodes that a process plays at a time."""
    tasks: Annotated[PositiveInt, _WITH_ENVIRONMENT] = 1024
    """With `data=environment`: most of the environment's own tasks."""
    timeout_s: Annotated[Seconds, _WITH_ENDPOINT] = 300.0
    """Longest time for one episode."""
    memory_gib: Annotated[PositiveFloat, _WITH_ENVIRONMENT] = 4.0
    """Most memory of one process, with what it starts."""
    on_error: Annotated[str, OneOf("fail", "drop", "value"), _WITH_ENDPOINT] = "drop"
    """An episode that raises, hangs, or takes its process with it: `drop` leaves it out of the
    update, `value` scores it `error_value`, `fail` ends the job."""
    error_value: Annotated[float, AppliesIf("environment.on_error=value")] = 0.0
    """The score of such an episode."""


def is_served(rollout: RolloutConfig, environment: EnvironmentConfig) -> bool:
    """Return whether samples are produced by programs that call the model over an endpoint. Then a
    sample may have several branches with different prompts."""
    return environment.name is not None or rollout.serve
