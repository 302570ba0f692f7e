"""Settings of what is learned: the data, what is rewarded, and the objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.bounds import (
    Name,
    NonNegativeFloat,
    NonNegativeInt,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Probability,
    Range,
    Regex,
    Seconds,
    Share,
    TextOrTexts,
    With,
)

SUPERVISED = With("trainer.name=sft")
RESPONSES = With("trainer.name=sft", "trainer.name=dpo", "trainer.name=reward_model")
PAIRS = With("trainer.name=dpo", "trainer.name=reward_model")
DPO = With("trainer.name=dpo")
DISCOUNTED = With(
    *("trainer.name=ppo", "trainer.name=safe_rlhf", "trainer.name=remax"),
    "algorithm.advantage=reinforce_plus_plus",
)
VALUES = With("trainer.name=ppo", "trainer.name=safe_rlhf")
FROM_FILES = With("data.path")
JUDGED = With(".path")
CORRECTED = With(
    *("algorithm.correction=truncate", "algorithm.correction=mask"),
    *("rollout.quantization=int8", "rollout.quantization=fp8", "rollout.plan"),
)
WITH_KL = With("algorithm.kl_coefficient")


@dataclass
class DataConfig:
    """The prompts, examples or preference pairs."""

    task: Name | None = None
    """A built-in task, or null to read `path`."""
    path: Name | None = None
    """JSONL or Parquet file, folder or glob; or the name of a data set on the hub."""
    split: Annotated[Name | None, FROM_FILES] = None
    """Of a data set on the hub, or of a folder with files for several splits; null: `train`."""
    eval_path: Annotated[Name | None, FROM_FILES] = None
    """Held-out prompts; null: those of `path` in another split if it is a folder with files of
    several, else `eval.prompts` of its rows, drawn by `run.seed`."""
    eval_split: Annotated[Name | None, FROM_FILES] = None
    """Of `eval_path`, as `split` is of `path`."""
    prompt_column: Annotated[Name | None, FROM_FILES] = "prompt"
    """Text, or a list of chat messages; null for preference pairs whose answers are conversations
    that hold the prompt."""
    answer_column: Annotated[Name | None, FROM_FILES] = "answer"
    """Passed to the reward function; null if there is none."""
    response_column: Annotated[Name, SUPERVISED] = "response"
    """Supervised fine-tuning: what to answer, text or chat messages."""
    messages_column: Annotated[Name | None, SUPERVISED] = None
    """Supervised fine-tuning: whole conversations, of which the assistant's turns are learned; null
    reads `prompt_column` and `response_column`."""
    chosen_column: Annotated[Name, PAIRS] = "chosen"
    """Preference pairs: the better answer, text or chat messages that end with it."""
    rejected_column: Annotated[Name, PAIRS] = "rejected"
    """Preference pairs: the worse answer."""
    margin_column: Annotated[Name | None, PAIRS] = None
    """Preference pairs: how much better the chosen answer is; null: 0 for all."""
    chat: Annotated[bool | None, FROM_FILES] = None
    """Whether prompts go through the chat template; null: when they are chat messages."""
    system_prompt: Annotated[str | None, FROM_FILES] = None
    """What the chat template puts before each prompt; null: what the template itself has."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt; see `too_long`."""
    max_response_tokens: Annotated[PositiveInt | None, RESPONSES] = None
    """Longest response of the data, its end included (supervised fine-tuning, preference pairs);
    null: any."""
    too_long: Annotated[str, OneOf("error", "drop"), FROM_FILES] = "error"
    """What to do with longer rows: `error` or `drop`."""
    prompts_per_step: PositiveInt = 64
    """Prompts, examples or pairs that a step learns from."""
    shuffle: bool = True
    """Another order in each epoch; false: that of the file."""
    sampler: Name | None = None
    """`path/to/file.py:Name`: a class that chooses the rows of each step by what their samples
    scored; see `hybridrl.trainers.feed.Sampler`."""


@dataclass
class JudgeConfig:
    """A language model that grades answers, beside the functions."""

    path: Name | None = None
    """Folder or hub name; null: no judge."""
    template: Annotated[Name | None, JUDGED] = None
    """A text file in which `{prompt}`, `{response}`, `{answer}` and any other column of the data
    stand for their values; null: a general one."""
    pattern: Annotated[str, Regex(), JUDGED] = r"[Ss]core:\s*(-?[0-9.]+)"
    """Where the grade stands in what the judge writes: the regex's group, at its last match."""
    scale: Annotated[PositiveFloat, JUDGED] = 10.0
    """The best grade; grades are divided by it."""
    max_tokens: Annotated[PositiveInt, JUDGED] = 256
    """Longest that it writes."""
    context: Annotated[PositiveInt, JUDGED] = 4096
    """Longest template with its values, and what the judge writes, in tokens."""
    weight: Annotated[float, JUDGED] = 1.0
    """Of its grade among the functions' scores."""
    memory_share: Annotated[Share, JUDGED] = 0.2
    """Of a GPU's memory, for its weights and its cache, beside rollout.memory_share."""


@dataclass
class RewardConfig:
    """What is reinforced."""

    function: Annotated[Any, TextOrTexts()] = "exact"
    """A built-in one (`exact`, `numeric`, `contains`, `boxed`, `math`, `format`, `length`),
    `path/to/file.py:name`, `package.module:name`; or a list."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the functions, by their names:
    `reward.options.format.pattern='<think>.*</think>.*'`."""
    weights: list[float] | None = None
    """One per function; null weighs all 1."""
    model: Name | None = None
    """A reward model (a sequence-classification folder or hub name), beside the functions."""
    model_weight: Annotated[float, With(".model")] = 1.0
    """Of the reward model's score among the functions'."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    processes: Annotated[int, Range(least=1, most=1024)] = 1
    """Processes per device that run the functions."""
    timeout_s: Seconds = 30.0
    """Longest time for one sample."""
    on_error: Annotated[str, OneOf("fail", "drop", "value")] = "fail"
    """A function that raises, hangs or returns nonsense: `fail` ends the job, `drop` leaves the
    sample out of the update, `value` scores it `error_value`."""
    error_value: Annotated[float, With(".on_error=value")] = 0.0
    """The score of such a sample."""
    correct_at: float = 1.0
    """A sample counts as correct, for accuracy, from this score on."""


@dataclass
class CostConfig(RewardConfig):
    """What is to stay below a limit, for `safe_rlhf`: scored as rewards are."""

    limit: float = 0.0
    """Mean cost that is allowed."""
    multiplier: PositiveFloat = 1.0
    """First weight of the cost against the reward."""
    multiplier_rate: NonNegativeFloat = 0.1
    """Most that the logarithm of the multiplier moves in a step: by this times the violation of the
    limit, from -1 to 1."""
    multiplier_max: PositiveFloat = 10.0
    """Largest weight."""


@dataclass
class AlgorithmConfig:
    """The objective; names are those of `hybridrl.algorithms`."""

    advantage: Annotated[Name, With("trainer.name=grpo")] = "group_relative"
    """For `grpo`: `group_relative`, `leave_one_out`, `optimal_reward_baseline`, `pass_at_k`,
    `reinforce_plus_plus` or `reinforce_plus_plus_baseline`, or a function of yours,
    `path/to/file.py:name`."""
    advantage_scale: Annotated[str, OneOf("std", "batch", "none")] = "std"
    """`std`, `batch` or `none`, of the estimators that know it."""
    gamma: Annotated[Probability, DISCOUNTED] = 1.0
    """Discount of later rewards."""
    lam: Annotated[Probability, VALUES] = 1.0
    """Of generalised advantage estimation."""
    policy_loss: Name = "ppo_clip"
    """`ppo_clip`, `gspo`, `cispo`, `reinforce`, `sapo` or `gmpo`, or a function of yours."""
    clip_low: NonNegativeFloat = 0.2
    """How far below 1 the ratio to the policy that sampled is clipped."""
    clip_high: NonNegativeFloat = 0.2
    """How far above 1."""
    dual_clip: Annotated[float, Range(above=1)] | None = None
    """Largest ratio that counts where the advantage is negative; null: any."""
    loss_options: dict[str, float] = field(default_factory=dict)
    """Further options of the policy loss, such as `tau_positive` of `sapo`."""
    aggregation: Annotated[
        str,
        OneOf(
            "token-mean",
            "seq-mean-token-mean",
            "seq-mean-token-sum",
            "seq-mean-token-sum-norm",
            "token-sum",
        ),
    ] = "token-mean"
    """How the losses of a step's tokens become one; see `hybridrl.algorithms.weights`."""
    kl_coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; 0 needs no reference model."""
    kl_estimator: Annotated[
        str | None, OneOf("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"), WITH_KL
    ] = None
    """See `hybridrl.algorithms.kl`; null: `k1` in the reward, `k3+` in the loss."""
    kl_in_reward: Annotated[bool, WITH_KL] = False
    """Take the KL off the rewards instead of adding it to the loss; where an estimator knows one
    score a sample, the sum of its tokens."""
    kl_target: Annotated[PositiveFloat | None, With("algorithm.kl_in_reward")] = None
    """With `kl_in_reward`: adapt the coefficient until the KL is this; null keeps it."""
    kl_horizon: Annotated[PositiveFloat, With("algorithm.kl_target")] = 10000.0
    """Samples over which the coefficient adapts."""
    entropy_coefficient: float = 0.0
    """Weight of the policy's entropy, which is rewarded."""
    correction: Annotated[str, OneOf("auto", "none", "truncate", "mask")] = "auto"
    """For the gap between trainer and rollout engine, and for samples of an older policy:
    `truncate` or `mask` importance weights; or `none`. `auto`: `truncate` with
    `rollout.quantization`, or a `rollout.plan` of fewer bits, else `none`."""
    correction_level: Annotated[str, OneOf("token", "sequence"), CORRECTED] = "token"
    """`token` or `sequence`."""
    correction_low: Annotated[NonNegativeFloat | None, With("algorithm.correction=mask")] = None
    """Smallest weight that `mask` keeps."""
    correction_high: Annotated[PositiveFloat | None, CORRECTED] = 2.0
    """Largest weight."""
    dynamic_sampling: bool = False
    """Replace prompts whose samples all score alike, which teach nothing, by others (DAPO)."""
    max_refills: Annotated[NonNegativeInt, With("algorithm.dynamic_sampling")] = 4
    """Generations that a step may add to its first for that."""
    overlong_buffer: NonNegativeInt = 0
    """Tokens before `rollout.max_tokens` over which a penalty grows (DAPO); 0: no penalty."""
    overlong_factor: Annotated[NonNegativeFloat, With("algorithm.overlong_buffer")] = 1.0
    """The penalty at `rollout.max_tokens`."""
    ptx_coefficient: Annotated[NonNegativeFloat, VALUES] = 0.0
    """Weight of a supervised loss on the data's own answers, in a step of its own (`ppo`,
    `safe_rlhf`)."""


@dataclass
class DistillationConfig:
    """Learning what teachers think of the student's samples: trainer `distillation`."""

    loss: Annotated[str, OneOf("sampled", "reverse", "forward")] = "reverse"
    """`reverse`, KL(student, teacher), by the teacher's likeliest tokens; `forward`, KL(teacher,
    student), by the same; or `sampled`: the first, estimated by the tokens that were sampled."""
    top_k: Annotated[
        PositiveInt, With("distillation.loss=reverse", "distillation.loss=forward")
    ] = 64
    """So many of the teacher's likeliest tokens; all others count as one. As many as the vocabulary
    has: nothing is left out."""
    by: Name | None = None
    """A column of the data whose value says which teacher a row has, `models.teacher_<value>`; rows
    of other values have `models.teacher`."""


@dataclass
class PreferenceConfig:
    """Learning from pairs: trainers `dpo` and `reward_model`."""

    loss: Annotated[str, OneOf("sigmoid", "ipo"), DPO] = "sigmoid"
    """Of `dpo`: `sigmoid` or `ipo`."""
    beta: Annotated[PositiveFloat, DPO] = 0.1
    """Of `dpo`: how hard the policy is held to the reference."""
    length_normalised: Annotated[bool, DPO] = False
    """Of `dpo`: mean instead of sum over the tokens of an answer."""
    nll_coefficient: Annotated[NonNegativeFloat, DPO] = 0.0
    """Of `dpo`: weight of the chosen answer's negative log-likelihood, which keeps it from becoming
    less likely together with the rejected one; 1 is usual."""
    centre: Annotated[NonNegativeFloat, With("trainer.name=reward_model")] = 0.0
    """Of `reward_model`: weight of the square of a pair's scores, which keeps them around 0."""
