"""The schema of data: sources, columns, and the rows of a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

from hybridrl.config.constraints import (
    AppliesIf,
    IsoDate,
    NameOrPath,
    OneOf,
    PositiveInt,
    Probability,
    ProperFraction,
    programs,
)

SUPERVISED = AppliesIf(*programs("sft", "offline_distillation"))
PAIRS = AppliesIf(*programs("dpo", "reward_model", "kto", "meta_reward_model"))
RESPONSES = AppliesIf(*SUPERVISED.conditions, *PAIRS.conditions)
GIVEN = AppliesIf(*programs("sft", "offline_distillation", "kto"))
RANKABLE = AppliesIf(*programs("dpo", "reward_model"))
_OF_TASKS = AppliesIf(*programs("meta_reward_model"))
_RANKED, _UNRANKED = AppliesIf(".ranked_column"), AppliesIf(".ranked_column=null")
_WITH_FILES = AppliesIf("data.path")
RENDERED = AppliesIf(
    *("data.path", "rollout.episode", "rollout.serve", "environment.name"),
    *("reward.judge.path", "cost.judge.path"),
)
_ANSWER_FORMATS = ("gsm8k", "boxed", "mbpp", "humaneval", "apps", "livecodebench")
_WITH_PREFIXES = AppliesIf(".order=prefix", ".order=auto")
_WITH_REASONING_GYM = AppliesIf("data.task=reasoning_gym")


@dataclass
class DataConfig:
    """The data to learn from: a built-in task or files, the columns of their rows, what to do with
    rows that are too long or cannot be read, and how many a step takes; see docs/data.md."""

    task: NameOrPath | None = None
    """A built-in task, or null to read `path`."""
    tasks: Annotated[list[str], _WITH_REASONING_GYM] = field(default_factory=list)
    """Of reasoning-gym: the names of its tasks, as many rows of each."""
    task_options: Annotated[dict[str, Any], _WITH_REASONING_GYM] = field(default_factory=dict)
    """Of reasoning-gym: the parameters of its tasks,
    `data.task_options.chain_sum.max_terms=4`."""
    rows: Annotated[PositiveInt, _WITH_REASONING_GYM] = 2000
    """Of reasoning-gym: how many problems to learn from, of all tasks together."""
    path: NameOrPath | None = None
    """JSON, CSV or Parquet file, folder or glob; or the name of a data set on the hub."""
    sources: Annotated[dict[str, Any], AppliesIf("data.sources")] = field(default_factory=dict)
    """A mixture, by names of yours: each source has a `path` or a `task`, any other setting of
    `data` that is about columns, and `weight`, `reward` and `eval_prompts`. See docs/data.md."""
    split: Annotated[NameOrPath | None, _WITH_FILES] = None
    """Of a data set on the hub, or of a folder with files for several splits; null: `train`."""
    eval_path: Annotated[NameOrPath | None, _WITH_FILES] = None
    """Held-out prompts; null: those of `path` in another split if it is a folder with files of
    several, else `eval.prompts` of its rows, drawn by `run.seed`."""
    eval_split: Annotated[NameOrPath | None, _WITH_FILES, AppliesIf("data.eval_path")] = None
    """Of `eval_path`, as `split` is of `path`."""
    prompt_column: Annotated[NameOrPath | None, _WITH_FILES] = "prompt"
    """Text, or a list of chat messages; null for preference pairs whose responses are conversations
    that hold the prompt."""
    answer_column: Annotated[NameOrPath | None, _WITH_FILES] = "answer"
    """Passed to the reward function; null if there is none."""
    answer_format: Annotated[
        str,
        OneOf("plain", *_ANSWER_FORMATS),
        AppliesIf(*(f"data.answer_format={one}" for one in _ANSWER_FORMATS)),
    ] = "plain"
    """How rows say what is right: `plain`, the whole column; `gsm8k`, what follows its last `####`;
    `boxed`, what stands in its last `\\boxed{}`; or programs' tests as the columns of these sets
    hold them, for `hybridrl.rewards.code:passes_tests`."""
    response_column: Annotated[NameOrPath, GIVEN] = "response"
    """Supervised fine-tuning: the response to learn, text or chat messages. With `kto` the response
    that is good or bad."""
    label_column: Annotated[NameOrPath | None, AppliesIf(*programs("kto"))] = "label"
    """Of `kto`: whether the response is good, true or false; null: rows are preference pairs, of
    which the chosen response is good and the rejected one bad."""
    messages_column: Annotated[NameOrPath | None, SUPERVISED] = None
    """Supervised fine-tuning: whole conversations, of which the assistant's turns are learned; null
    reads `prompt_column` and `response_column`."""
    learn: Annotated[str, OneOf("all", "last", "each"), GIVEN] = "all"
    """Supervised fine-tuning: which of the assistant's turns of a conversation are learned: `all`,
    in one row if the chat template shows each as the model generates it, else in as many as it
    takes; `each` in a row of its own; or the `last` alone."""
    chosen_column: Annotated[NameOrPath, PAIRS, _UNRANKED] = "chosen"
    """Preference pairs: the better response, text or chat messages that end with it."""
    rejected_column: Annotated[NameOrPath, PAIRS, _UNRANKED] = "rejected"
    """Preference pairs: the worse response."""
    margin_column: Annotated[NameOrPath | None, RANKABLE, _UNRANKED] = None
    """Preference pairs: how much better the chosen response is; null: 0 for all."""
    task_column: Annotated[NameOrPath | None, _OF_TASKS] = None
    """Preference pairs of many tasks: a column with the name, text or a whole number, of the
    annotator, domain or user that a pair is of."""
    ranked_column: Annotated[NameOrPath | None, RANKABLE] = None
    """Preference pairs of rankings: a column with a list of responses, the best one first, in place
    of the columns of pairs; null: rows are pairs."""
    scores_column: Annotated[NameOrPath | None, RANKABLE, _RANKED] = None
    """A column with a list of numbers, one for each response of `ranked_column`, which need not be
    in order then. Differences are the margins; there are no pairs of equal scores."""
    ranked_pairs: Annotated[str, OneOf("all", "ends"), RANKABLE, _RANKED] = "all"
    """Which pairs of a ranking are learned: `all`, each response against each worse one; or the
    `ends`, the best against the worst."""
    chat: Annotated[bool | None, _WITH_FILES] = None
    """Whether prompts go through the chat template; null: when they are chat messages."""
    system_prompt: Annotated[str | None, _WITH_FILES] = None
    """What the chat template puts before each prompt; null: what the template itself has."""
    tools_column: Annotated[NameOrPath | None, _WITH_FILES] = "tools"
    """The functions that the model may call, as objects or JSON text, which the chat template puts
    into the prompt. The column may be missing; null: none, whatever the column `tools` holds."""
    chat_template_options: Annotated[dict[str, Any], RENDERED] = field(default_factory=dict)
    """Variables of the chat template, wherever it is rendered: `enable_thinking`,
    `reasoning_effort`, `date_string`; `data.chat_template_options.enable_thinking=false`."""
    date: Annotated[str | None, IsoDate(), RENDERED] = None
    """The date that chat templates write into prompts; null: that of the run's first start, which
    its resumes and forks keep."""
    max_prompt_tokens: PositiveInt = 1024
    """Longest prompt; see `too_long`."""
    max_response_tokens: Annotated[PositiveInt | None, RESPONSES] = None
    """Longest response of the data, its end included (supervised fine-tuning, preference pairs);
    null: any."""
    too_long: Annotated[str, OneOf("error", "drop"), _WITH_FILES] = "error"
    """What to do with longer rows: `error` or `drop`."""
    bad_rows: Annotated[str, OneOf("error", "drop"), _WITH_FILES] = "error"
    """What to do with rows that cannot be read, such as one without an answer: `error` or `drop`,
    which counts them by reason in the log and in `data-report.json`."""
    bad_rows_limit: Annotated[ProperFraction, AppliesIf("data.bad_rows=drop")] = 0.05
    """With `data.bad_rows=drop`, the largest share of rows to leave out; more is an error."""
    prompts_per_step: PositiveInt = 64
    """Prompts, examples or pairs that a step learns from."""
    shuffle: Annotated[bool, AppliesIf("data.sampler=null")] = True
    """Another order in each epoch; false: that of the file."""
    order: Annotated[str, OneOf("random", "prefix", "auto"), _WITH_PREFIXES] = "random"
    """Which prompts come in the same step: `random` ones, or `prefix`, those that begin with the
    same tokens (system prompts, examples, documents), for which vLLM then computes these once; or
    `auto`: `prefix` if that spares a quarter of all tokens that are computed. See docs/data.md."""
    max_shuffle_error: Annotated[Probability, _WITH_PREFIXES] = 0.05
    """With `data.order=prefix`, how much further the sources, difficulties and lengths of a step's
    prompts may be from those of all prompts than with a random order: total variation distance,
    mean of many steps."""
    sampler: NameOrPath | None = None
    """Chooses the rows of each step by what their samples scored: `pass_rate`, `difficulty`, or a
    class of yours, `path/to/file.py:Name`; null: each row once in an epoch. See docs/data.md."""
    sampler_options: Annotated[dict[str, Any], AppliesIf("data.sampler")] = field(
        default_factory=dict
    )
    """Keyword arguments of the sampler."""
