"""Settings of what is learned: the data, what is rewarded, and the objective."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
    sampler: str | None = None
    """`path/to/file.py:Name`: a class that chooses the rows of each step by what their samples
    scored; see `hybridrl.trainers.feed.Sampler`."""


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
    memory_share: float = 0.2
    """Of a GPU's memory, for its weights and its cache, beside rollout.memory_share."""


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
    """Most that the logarithm of the multiplier moves in a step: by this times the violation of the
    limit, from -1 to 1."""
    multiplier_max: float = 10.0
    """Largest weight."""


@dataclass
class AlgorithmConfig:
    """The objective; names are those of `hybridrl.algorithms`."""

    advantage: str = "group_relative"
    """For `grpo`: `group_relative`, `leave_one_out`, `optimal_reward_baseline`, `pass_at_k`,
    `reinforce_plus_plus` or `reinforce_plus_plus_baseline`, or a function of yours,
    `path/to/file.py:name`."""
    advantage_scale: str = "std"
    """`std`, `batch` or `none`, of the estimators that know it."""
    gamma: float = 1.0
    """Discount of later rewards."""
    lam: float = 1.0
    """Of generalised advantage estimation."""
    policy_loss: str = "ppo_clip"
    """`ppo_clip`, `gspo`, `cispo`, `reinforce`, `sapo` or `gmpo`, or a function of yours."""
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
    kl_estimator: str | None = None
    """`k1`, `k2`, `k3`, `abs`, each also with `+`; null: `k1` in the reward, `k3+` in the loss."""
    kl_in_reward: bool = False
    """Take the KL off the rewards instead of adding it to the loss; where an estimator knows one
    score a sample, the sum of its tokens."""
    kl_target: float | None = None
    """With `kl_in_reward`: adapt the coefficient until the KL is this; null keeps it."""
    kl_horizon: float = 10000.0
    """Samples over which the coefficient adapts."""
    entropy_coefficient: float = 0.0
    correction: str = "none"
    """For the gap between trainer and rollout engine, and for samples of an older policy:
    `truncate` or `mask` importance weights."""
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
