"""The schema of the objective: algorithm, distillation, preferences."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    NameOrNames,
    NameOrPath,
    NonNegativeFloat,
    NonNegativeInt,
    NumberRange,
    OneOf,
    PositiveFloat,
    PositiveInt,
    Probability,
    ProperFraction,
    RegexWithGroup,
    Seconds,
    programs,
)

DPO = AppliesIf(*programs("dpo", "online_dpo"))
GRPO = AppliesIf(*programs("grpo"))
VALUES = AppliesIf(*programs("ppo", "safe_rlhf"))
_REINFORCES = programs("grpo", "ppo", "remax", "safe_rlhf")
REINFORCED = AppliesIf(*_REINFORCES)
"""Rewards become advantages."""
BY_LOSS = AppliesIf(*_REINFORCES, "distillation.loss=sampled")
"""The actor learns by a `PolicyObjective`."""
_SAMPLES = (*_REINFORCES, *programs("online_dpo", "expert_iteration", "distillation"))
SAMPLED = AppliesIf(*_SAMPLES, *programs("evaluate"))
"""Responses are sampled, and scored."""
WARMED_UP = AppliesIf(*_SAMPLES)
"""What samples also trains."""
_SUPERVISED = ("expert_iteration", "distillation", "offline_distillation", "sft")
MINI_BATCHES = AppliesIf(*_REINFORCES, *programs(*_SUPERVISED))
_WITH_DISCOUNTED_RETURNS = AppliesIf(
    *programs("ppo", "safe_rlhf"),
    *("algorithm.advantage=reinforce_plus_plus", "algorithm.turn_credit=turn"),
    "algorithm.step_credit",
)
SCALED = AppliesIf("algorithm.advantage=group_relative", "algorithm.advantage=pass_at_k")
_RANGES = ("ppo_clip", "gspo", "cispo", "gmpo", "dppo_tv", "dppo_kl")
CLIPPED = AppliesIf(*(f"algorithm.policy_loss={name}" for name in _RANGES))
_WITH_JUDGE = AppliesIf(".path")
MASKED = AppliesIf("algorithm.correction=mask")
_BY_KL = AppliesIf("algorithm.correction=kpop")
_WITH_CORRECTION = AppliesIf(
    *("algorithm.correction=truncate", "algorithm.correction=mask"),
    *("rollout.quantization=int8", "rollout.quantization=fp8", "rollout.kv_cache=fp8"),
    *("rollout.plan", "models.actor.precision"),
    *("placement.staleness", "placement.in_flight", "algorithm.replay_share", "rollout.partial"),
    *("rollout.weight_sync=int8", "rollout.weight_sync=int4_delta"),
)
WITH_TURNS = AppliesIf("rollout.episode", "rollout.serve", "environment.name")
_WITH_KL = AppliesIf("algorithm.kl_coefficient")
_WITH_REPLAY = AppliesIf("algorithm.replay_share")
SHAPED = AppliesIf(*programs("grpo", "ppo", "online_dpo"))
"""Scores are shaped before they are learned from."""
STEPPED = AppliesIf(*programs("grpo", "ppo"))
PER_TOKEN = AppliesIf(*programs("ppo", "remax", "safe_rlhf"))
"""Each token has a reward of its own."""
PER_TURN = AppliesIf(*programs("grpo", "ppo", "safe_rlhf"))


@dataclass
class JudgeConfig:
    """A language model that grades responses, in addition to the functions."""

    path: NameOrPath | None = None
    """Folder or hub name; null: no judge."""
    template: Annotated[NameOrPath | None, _WITH_JUDGE] = None
    """A text file in which `{prompt}`, `{response}`, `{answer}` and any other column of the data
    stand for their values; null: a general one."""
    chat_template_options: Annotated[dict[str, Any] | None, _WITH_JUDGE] = None
    """Variables of the judge's own chat template; null: `data.chat_template_options`."""
    mode: Annotated[str, OneOf("grade", "rank"), _WITH_JUDGE] = "grade"
    """`grade`: each response by itself; `rank`: all responses to a prompt are put in order in one
    request, in a random order, and score from 1, the best, to 0."""
    rubric: Annotated[NameOrPath | None, _WITH_JUDGE] = None
    """A file (JSON or YAML) with a list of criteria, each a text or `{criterion, weight}`. The
    judge grades each of them, and the score is the weighted share that is met."""
    rubric_column: Annotated[NameOrPath | None, _WITH_JUDGE] = None
    """A column of the data with such a list for each row, in place of a file."""
    pattern: Annotated[str | None, RegexWithGroup(), _WITH_JUDGE] = None
    """Where the grade, or the ranking, stands in what the judge writes: the regex's group, at its
    last match; null: behind `Score:`, or `Ranking:`."""
    scale: Annotated[PositiveFloat, _WITH_JUDGE] = 10.0
    """The best grade; grades are divided by it."""
    max_tokens: Annotated[PositiveInt, _WITH_JUDGE] = 256
    """Longest that it writes."""
    context: Annotated[PositiveInt, _WITH_JUDGE] = 4096
    """Longest template with its values, and what the judge writes, in tokens."""
    weight: Annotated[float, _WITH_JUDGE] = 1.0
    """Of its grade among the functions' scores."""
    memory_share: Annotated[
        ProperFraction, _WITH_JUDGE, AppliesIf("devices=auto", "devices=cuda")
    ] = 0.2
    """Of a GPU's memory, for its weights and its cache, beside rollout.memory_share."""


@dataclass
class RewardConfig:
    """The reward: functions, a reward model and a judge, with their weights."""

    function: Annotated[Any, NameOrNames()] = "exact"
    """A built-in one (`exact`, `numeric`, `contains`, `boxed`, `math`, `format`, `length`,
    `target_length`), `path/to/file.py:name`, `package.module:name`; or a list. With
    `environment.name` or `rollout.serve` the default is none: the program reports the reward."""
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the functions, by their names:
    `reward.options.format.pattern='<think>.*</think>.*'`."""
    weights: list[float] | None = None
    """One per function; null weighs all 1."""
    model: NameOrPath | None = None
    """A reward model (a sequence-classification folder or hub name), beside the functions."""
    model_weight: Annotated[float, AppliesIf(".model")] = 1.0
    """Of the reward model's score among the functions'."""
    model_steps: Annotated[str | None, AppliesIf(".model")] = None
    """Have the reward model score each step of a response, as this text parts them (such as a blank
    line), for `algorithm.step_credit`; null: the whole response at its end."""
    shorter: Annotated[NonNegativeFloat, SHAPED, AppliesIf(".shorter")] = 0.0
    """Weight of a reward for right responses with fewer sampled tokens than others to their prompt
    (Kimi k1.5), and a penalty for longer ones; 0: length does not matter."""
    normalise_by: Annotated[NameOrPath | None, SHAPED, AppliesIf(".normalise_by")] = None
    """A column of the data, such as `source`: scores are learned from minus the mean, and over the
    standard deviation, of all scores so far of the same value. null: as they are."""
    check: Annotated[Any, NameOrNames(), AppliesIf(".check")] = None
    """A function, or a list: measured on all samples as `check/<name>` and never rewarded, so that
    `guard.tripwires` can see a reward rise that means nothing."""
    judge: JudgeConfig = field(default_factory=JudgeConfig)
    processes: Annotated[int | None, NumberRange(least=1, most=1024)] = 1
    """Processes per device that run the functions; null: one for each core that the device has
    beside its own."""
    timeout_s: Seconds = 30.0
    """Longest time for one sample."""
    on_error: Annotated[str, OneOf("fail", "drop", "value")] = "fail"
    """A function that raises, hangs or returns nonsense: `fail` ends the job, `drop` leaves the
    sample out of the update, `value` scores it `error_value`."""
    error_value: Annotated[float, AppliesIf(".on_error=value")] = 0.0
    """The score of such a sample."""
    env: Annotated[list[str], AppliesIf(".env")] = field(default_factory=list)
    """Environment variables with secrets that the functions get, by name or pattern
    (`OPENAI_API_KEY`, `AWS_*`). They run without all others: see `environment.env`."""
    correct_at: float = 1.0
    """A sample is right if its outcome is at least this: its score without rewards of steps, and
    before `reward.shorter` and `reward.normalise_by`."""


@dataclass
class CostConfig(RewardConfig):
    """The cost that `safe_rlhf` keeps below a limit, scored as rewards are."""

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

    advantage: Annotated[NameOrPath, GRPO] = "group_relative"
    """For `grpo`: `group_relative`, `leave_one_out`, `optimal_reward_baseline`, `pass_at_k`,
    `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `maximum_likelihood` or `gdpo`, or a
    function of yours, `path/to/file.py:name`."""
    advantage_scale: Annotated[str, OneOf("std", "batch", "none"), GRPO, SCALED] = "std"
    """`std`, `batch` or `none`, of the estimators that know it."""
    turn_credit: Annotated[str, OneOf("episode", "turn"), WITH_TURNS, PER_TURN] = "episode"
    """Of samples of several turns: `episode`, each token has the credit of the whole; `turn`, that
    of its turn: the rewards from then on, compared with those of the same turn of the group."""
    step_credit: Annotated[
        str | None, OneOf("sum", "min"), STEPPED, AppliesIf("algorithm.step_credit")
    ] = None
    """Where rewards come step by step (`steps` of a reward function, `reward.model_steps`): `sum`,
    a step has the credit of all rewards from it on; `min`, the same, with each reward weighed by
    its share of the softmax of -reward / 0.1 in the sample, so that the worst counts (PURE); in
    `grpo` compared with the same step of the group. null: only the sum of a sample's steps
    counts."""
    gamma: Annotated[Probability, REINFORCED, _WITH_DISCOUNTED_RETURNS] = 1.0
    """Discount of later rewards."""
    lam: Annotated[Probability, VALUES] = 1.0
    """Of generalised advantage estimation."""
    policy_loss: Annotated[NameOrPath, BY_LOSS] = "ppo_clip"
    """`ppo_clip`, `gspo`, `cispo`, `reinforce`, `sapo`, `gmpo`, `vespo`, `dppo_tv` or `dppo_kl`, or
    a function of yours."""
    clip_low: Annotated[NonNegativeFloat, BY_LOSS, CLIPPED] = 0.2
    """How far below 1 the ratio to the policy that sampled is clipped; with `dppo_tv` and `dppo_kl`
    the divergence beyond which a token is not made less likely."""
    clip_high: Annotated[NonNegativeFloat, BY_LOSS, CLIPPED] = 0.2
    """How far above 1; with `dppo_tv` and `dppo_kl` for tokens that would become likelier."""
    dual_clip: Annotated[
        float | None, NumberRange(above=1), BY_LOSS, AppliesIf("algorithm.policy_loss=ppo_clip")
    ] = None
    """Largest ratio that counts where the advantage is negative; null: any."""
    loss_options: Annotated[dict[str, float], BY_LOSS] = field(default_factory=dict)
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
        MINI_BATCHES,
    ] = "token-mean"
    """How the losses of a step's tokens become one; see `hybridrl.algorithms.token_weighting`."""
    kl_coefficient: Annotated[NonNegativeFloat, REINFORCED] = 0.0
    """Weight of the KL to the reference; 0 needs no reference model."""
    kl_estimator: Annotated[
        str | None,
        OneOf("k1", "k2", "k3", "abs", "k1+", "k2+", "k3+", "abs+"),
        REINFORCED,
        _WITH_KL,
    ] = None
    """See `hybridrl.algorithms.kl_divergence`; null: `k1` in the reward, `k3+` in the loss."""
    kl_in_reward: Annotated[bool, REINFORCED, _WITH_KL] = False
    """Take the KL off the rewards instead of adding it to the loss; where an estimator knows one
    score a sample, the sum of its tokens."""
    kl_target: Annotated[
        float | None,
        NumberRange(
            above=0,
            most=1,
            why="It is in nats per token. A target of a whole response, such as 6 in Ziegler et "
            "al. 2019, is divided by the tokens of a response.",
        ),
        PER_TOKEN,
        AppliesIf("algorithm.kl_in_reward"),
    ] = None
    """With `kl_in_reward`: adapt the coefficient until the KL, in nats per token, is this; null
    keeps it."""
    kl_horizon: Annotated[PositiveFloat, AppliesIf("algorithm.kl_target")] = 10000.0
    """Samples over which the coefficient adapts."""
    entropy_coefficient: Annotated[float, BY_LOSS] = 0.0
    """Weight of the policy's entropy, which is rewarded."""
    correction: Annotated[str, OneOf("auto", "none", "truncate", "mask", "kpop"), BY_LOSS] = "auto"
    """For the gap between trainer and rollout engine, and for samples of an older policy:
    `truncate` or `mask` importance weights, `kpop` masks them by a KL; or `none`. `auto`:
    `truncate` with `rollout.quantization`, `rollout.kv_cache=fp8` or a `rollout.plan` of fewer
    bits; else `none`. Samples of an older policy (`placement.staleness`, `placement.in_flight`,
    `algorithm.replay_share`, `rollout.partial`, a `rollout.weight_sync` with losses) are then
    weighed by the loss, whose ratios are to the policy that sampled; `reinforce`, which has none,
    and `gspo`, whose clip range is too narrow, are corrected by `truncate`."""
    correction_level: Annotated[
        str, OneOf("token", "sequence", "geometric"), BY_LOSS, _WITH_CORRECTION
    ] = "token"
    """Of each `token`, of a `sequence` as the product over its tokens, or as their `geometric`
    mean, which does not depend on the length."""
    correction_low: Annotated[NonNegativeFloat | None, BY_LOSS, MASKED] = None
    """Smallest weight that `mask` keeps."""
    correction_high: Annotated[PositiveFloat | None, BY_LOSS, _WITH_CORRECTION] = 2.0
    """Largest weight."""
    correction_kl: Annotated[PositiveFloat, BY_LOSS, _BY_KL] = 0.1
    """Largest KL, in nats, between trainer and rollout engine in their choice between a token and
    all others, with which `kpop` keeps it; in either direction."""
    negative_kl_max: Annotated[PositiveFloat | None, BY_LOSS, AppliesIf(".negative_kl_max")] = None
    """Largest mean KL, in nats per token, from the policy that sampled a response to the one that
    learns, with which tokens of negative advantage count (DeepSeek-V3.2); null: any."""
    dynamic_sampling: Annotated[bool, GRPO] = False
    """Replace prompts whose samples all score alike, which teach nothing, by others (DAPO)."""
    max_refills: Annotated[NonNegativeInt, AppliesIf("algorithm.dynamic_sampling")] = 4
    """Generations that a step may add to its first for that."""
    replay_share: Annotated[float, NumberRange(least=0, most=0.9), GRPO, _WITH_REPLAY] = 0.0
    """For `grpo`: of what a step learns from, at most this share is of prompts of earlier steps,
    with the samples that they had then. It comes on top of the step's own. 0: no replay."""
    replay_age: Annotated[PositiveInt, _WITH_REPLAY] = 8
    """Such samples are at most so many updates of the policy old."""
    overlong_buffer: Annotated[NonNegativeInt, REINFORCED] = 0
    """Tokens before `rollout.max_tokens` over which a penalty grows (DAPO); 0: no penalty."""
    overlong_factor: Annotated[
        NonNegativeFloat, REINFORCED, AppliesIf("algorithm.overlong_buffer")
    ] = 1.0
    """The penalty at `rollout.max_tokens`."""
    ptx_coefficient: Annotated[NonNegativeFloat, BY_LOSS, AppliesIf("data.task")] = 0.0
    """Weight of a supervised loss on the right responses of a built-in task, in an update of its
    own after those of a step."""


@dataclass
class DistillationConfig:
    """Distillation from teachers, on the student's samples (trainer `distillation`) or on given
    responses (`offline_distillation`)."""

    loss: Annotated[str, OneOf("sampled", "reverse", "forward")] = "reverse"
    """`reverse`, KL(student, teacher), by the teacher's likeliest tokens; `forward`, KL(teacher,
    student), by the same; or `sampled`: the first, estimated by the tokens that were sampled."""
    top_k: Annotated[
        PositiveInt, AppliesIf("distillation.loss=reverse", "distillation.loss=forward")
    ] = 64
    """So many of the teacher's likeliest tokens; all others count as one. As many as the vocabulary
    has: nothing is left out."""
    alignment: Annotated[str, OneOf("tokens", "bytes")] = "tokens"
    """How teachers' tokens fit the student's. `tokens`: they are the same; `bytes`: a teacher has a
    tokenizer of its own, and what it says counts by the bytes of the text."""
    teacher: Annotated[str, OneOf("model", "self")] = "model"
    """`model`: `models.teacher.path`, or a server at `models.teacher.url`; `self`: the policy as it
    began, which reads `teacher_prompt`."""
    teacher_prompt: NameOrPath | None = None
    """A text file in which `{prompt}`, `{answer}` and any other column of the data stand for their
    values: what teachers read in place of the prompt, such as the right answer beside it. null: the
    prompt."""
    refresh_every: Annotated[NonNegativeInt, AppliesIf("distillation.teacher=self")] = 0
    """Steps after which the teacher takes weights of the policy, which are saved for it; 0: it
    stays as it began."""
    refresh_share: Annotated[
        float, NumberRange(above=0, most=1), AppliesIf("distillation.refresh_every")
    ] = 1.0
    """1: it becomes the policy; less: it moves this share of the way there (a moving average)."""
    by: NameOrPath | None = None
    """A column of the data whose value says which teacher a row has, `models.teacher_<value>`; rows
    of other values have `models.teacher`."""


@dataclass
class ExpertIterationConfig:
    """The selection of the policy's own responses that trainer `expert_iteration` learns."""

    choose: Annotated[str, OneOf("right", "best")] = "right"
    """`right`: each different right response (`reward.correct_at`) once; `best`: the best-scored
    response to each prompt."""
    most_per_prompt: Annotated[PositiveInt | None, AppliesIf("expert.choose=right")] = None
    """So many right responses to a prompt at most, in a step; null: any number."""
    steps_kept: PositiveInt = 4
    """A step learns from the responses of so many steps, the last ones."""
