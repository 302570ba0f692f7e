"""What a job is built from: a model's folder and rows of data, and whether they fit each other."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.eval_sets import eval_sets, evaluates_held_out, needs_held_out
from hybridrl.config.load import read_settings
from hybridrl.config.schema import Config, DataConfig, is_served
from hybridrl.config.task_settings import remark_on_task, without_task
from hybridrl.errors import ConfigError, Problems, nearest
from hybridrl.run_files.run_paths import SETTINGS
from hybridrl.system.storage import explain_write_errors
from hybridrl.trainers import load_trainer, name_of
from hybridrl.trainers.role_spec import SCORING, RoleSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.batch.batch import Batch
    from hybridrl.data.duplicates import DataReport
    from hybridrl.data.row_origin import RowOrigin
    from hybridrl.trainers.trainer import Trainer

HEAD_DIM_STEP = 32


@dataclass(frozen=True)
class Rows:
    """Tokenized data.

    Attributes:
        training, held_out: Of the kind that the trainer learns from.
        examples: Prompts with right responses; None where the data has none.
        longest_prompt, longest_response: In tokens; responses that are generated are as long as
            they may be.
        sets: Prompts of the sets of `eval.sets`, by their names; None: a function without data.
        longest_evaluated: Prompt and response together, of the sets; 0: there are none.
    """

    training: Batch
    held_out: Batch | None
    examples: Batch | None
    longest_prompt: int
    longest_response: int
    sets: Mapping[str, Batch | None] = field(default_factory=dict)
    longest_evaluated: int = 0


def model_folder(config: Config, run: Path) -> str:
    """Folder or hub name of the model; a tiny one is made in the run's folder if none is named."""
    return config.model.path or str(_make_tiny_model(config, run / "initial_model"))


def load_rows(config: Config, kind: str, tokenizer: Any) -> Rows:
    """The data.

    Args:
        kind: `prompts`, `examples` or `pairs`, as `Trainer.DATA` says.
    """
    from hybridrl.checks.settings.environment_checks import NO_ENVIRONMENT
    from hybridrl.data.datasets import check_apart, load_examples, load_pairs, load_prompts
    from hybridrl.data.environment_tasks import ENVIRONMENT, load_environment_tasks
    from hybridrl.data.mixture import load_sources, sources_of
    from hybridrl.data.preference_pairs import samples_of_pairs
    from hybridrl.data.row_origin import DATA

    trains = load_trainer(config.trainer.name).TRAINS
    if trains:
        for source in sources_of(config.data):
            check_apart(source.data, source.setting)
        check_apart(config.data)
    loaders = {"prompts": load_prompts, "examples": load_examples, "pairs": load_pairs}
    number = config.eval.prompts
    if not needs_held_out(config, trains):
        if not trains:  # the job's own data is the business of nobody
            sets = load_sets(config, tokenizer, None)
            first = next(rows for rows in sets.values() if rows is not None)
            longest = _longest([first], ("prompt_ids",))
            most = (one.own.max_tokens for one in eval_sets(config).values())
            response = max(limit or config.rollout.max_tokens for limit in most)
            return Rows(first, None, None, longest, response, *_with_longest(config, sets))
        number = 0

    def load(data: DataConfig, origin: RowOrigin, held_out: int) -> Sequence[Batch | None]:
        seed = config.run.seed
        return loaders[kind](data, tokenizer, held_out=held_out, seed=seed, origin=origin)

    examples = None
    if config.data.task == ENVIRONMENT and config.environment.name is None:
        raise ConfigError(NO_ENVIRONMENT)
    if config.data.task == ENVIRONMENT and kind != "prompts":
        raise ConfigError(
            f"data=environment with trainer.name={config.trainer.name}, which learns from {kind}: "
            "tasks of an environment have none. Take other data."
        )
    if config.data.task == ENVIRONMENT:
        training, held_out, examples = load_environment_tasks(
            config.data,
            config.environment,
            tokenizer,
            held_out=number,
            seed=config.run.seed,
        )
    elif config.data.sources:
        training, held_out, examples = load_sources(config.data, load, number)
    else:
        training, held_out, *further = load(config.data, DATA, number)
        examples = next(iter(further), None)
    assert training is not None
    if kind == "pairs":
        held_out = None if held_out is None else samples_of_pairs(held_out)
    batches = [training] if held_out is None else [training, held_out]
    response = config.rollout.max_tokens
    if kind != "prompts":
        response = _longest(batches, ("response_ids", "chosen_ids", "rejected_ids"))
    prompt = _longest(batches, ("prompt_ids",))
    if kind == "prompts" and is_served(config.rollout, config.environment):
        prompt = config.data.max_prompt_tokens  # a conversation grows beyond the row's prompt
    sets = load_sets(config, tokenizer, held_out)
    return Rows(training, held_out, examples, prompt, response, *_with_longest(config, sets))


def load_sets(config: Config, tokenizer: Any, held_out: Batch | None) -> dict[str, Batch | None]:
    """The prompts of the sets of `eval.sets`; None for a function that has no data.

    Args:
        held_out: The prompts of sets that name none.

    Raises:
        ConfigError, DataError: if those of a set cannot be read; names its settings.
    """
    from hybridrl.data.datasets import load_prompts_to_evaluate
    from hybridrl.data.held_out import draw_rows
    from hybridrl.data.row_origin import RowOrigin

    found: dict[str, Batch | None] = {}
    problems = Problems()
    for name, one in eval_sets(config).items():
        by, seed = one.own.by_column, config.run.seed
        origin = RowOrigin(one.setting / "data", str(one.setting), one.setting / "prompts")
        with problems.noted():
            if one.data is not None:
                rows = load_prompts_to_evaluate(
                    one.data, tokenizer, number=one.prompts, seed=seed, origin=origin
                )
            elif one.own.function is not None:
                rows = held_out
            elif held_out is None:
                raise ConfigError(
                    f"{one.setting} names no data, and none of the job's own rows are held out. "
                    f"Set {one.setting}.data.path=<file>."
                )
            else:
                rows = draw_rows(held_out, one.prompts, seed)
            if by is not None and rows is not None and by not in rows.columns:
                raise ConfigError(
                    f"{one.setting}.by_column is `{by}`, but its rows have no such column; they "
                    f"have {', '.join(rows.columns)}.{nearest(by, rows.columns)}"
                )
            found[name] = rows
    problems.raise_if_any()
    return found


def _with_longest(
    config: Config, sets: Mapping[str, Batch | None]
) -> tuple[Mapping[str, Batch | None], int]:
    longest = 0
    for name, one in eval_sets(config).items():
        rows, response = sets[name], one.own.max_tokens or config.rollout.max_tokens
        prompt = (
            config.data.max_prompt_tokens if rows is None else _longest([rows], ("prompt_ids",))
        )
        longest = max(longest, prompt + response)
    return sets, longest


def with_objects(
    config: Config,
    reward: Callable[..., Any] | Sequence[Callable[..., Any]] | None,
    data: Any,
    trainer: type[Trainer] | None,
) -> Config:
    """The settings with Python objects in place of the names that they have there.

    Raises:
        ConfigError: if one is not of its kind.
    """
    if reward is not None:
        functions = [reward] if callable(reward) else reward
        if not isinstance(functions, Sequence) or not all(map(callable, functions)):
            raise ConfigError(f"Job(reward={reward!r}): must be a function, or a list of them.")
        config = replace(config, reward=replace(config.reward, function=functions))
    if data is not None:
        config = without_task(config)
        config = replace(config, data=replace(config.data, path="data.parquet", split=None))
    if trainer is not None:
        if not isinstance(trainer, type):
            raise ConfigError(
                f"Job(trainer={trainer!r}): must be a class. Names go into the settings: "
                "trainer.name=..."
            )
        config = replace(config, trainer=replace(config.trainer, name=name_of(trainer)))
    return config


def with_date(config: Config) -> Config:
    """The settings with the date of the run where they say none: today's; of an evaluation of a
    run's model, that run's, so that it reads the prompts that the run did."""
    if config.data.date is not None:
        return config
    found = None
    if config.model.path is not None and not load_trainer(config.trainer.name).TRAINS:
        found = _date_of_run(Path(config.model.path))
    date = found or datetime.date.today().isoformat()
    return replace(config, data=replace(config.data, date=date))


def _date_of_run(model: Path) -> str | None:
    """The date of the run in whose folder, or in that of a step, a model is; None outside of
    runs."""
    for folder in model.absolute().parents[:3]:
        if (folder / SETTINGS).is_file():
            try:
                return read_settings(folder / SETTINGS).data.date
            except ConfigError:
                return None
    return None


def with_rows(config: Config, rows: Any, folder: Path) -> Config:
    """Write rows that were given as objects to `data.parquet`, where workers and later runs find
    them, and return the settings that name it.

    Args:
        rows: A list of dictionaries, a `datasets.Dataset`, or a `Batch`.

    Raises:
        ConfigError: if they are none of these.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hybridrl.batch.batch import Batch
    from hybridrl.data.table_columns import table_of

    if isinstance(rows, Batch):
        table = rows.table
    elif hasattr(rows, "with_format") and hasattr(rows, "column_names"):  # a datasets.Dataset
        table = rows.with_format("arrow")[:]
    elif isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        try:
            table = table_of(rows)
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"Job(data=...): the values of a column must be of one kind: {error}"
            ) from error
    else:
        raise ConfigError(
            f"Job(data=...) is a {type(rows).__name__}; it must be a list of dictionaries with at "
            "least one row, a datasets.Dataset, or a hybridrl.Batch."
        )
    file = folder / "data.parquet"
    with explain_write_errors(file):
        pq.write_table(table, file)
    return replace(config, data=replace(config.data, path=str(file.absolute())))


def check_tokenizers(
    config: Config, roles: Mapping[str, RoleSpec], tokenizer: Any, path: str
) -> None:
    """A model that scores, such as a reward model or a teacher, reads the policy's own token ids.

    Raises:
        ConfigError: if it has others.
    """
    from hybridrl.models import load_tokenizer

    for role, spec in roles.items():
        own = spec.path(role, config)
        if not own or load_tokenizer(own).get_vocab() == tokenizer.get_vocab():
            continue
        scores = spec.worker in SCORING
        setting = f"{spec.worker}.model" if scores else f"models.{role}.path"
        cure = f", or a judge ({spec.worker}.judge.path), which reads text" if scores else ""
        raise ConfigError(
            f"{setting}={own} has another vocabulary than the policy's tokenizer ({path}): it "
            f"would read other words than were written. Take a model of the same family{cure}."
        )


def check_lengths(config: Config, kind: str, rows: Rows, model: PretrainedConfig) -> None:
    """The longest sample has to fit the model, and a micro-batch.

    Raises:
        ConfigError: if it does not.
    """
    limit = getattr(model, "max_position_embeddings", None)
    setting = "rollout.max_tokens" if kind == "prompts" else "data.max_response_tokens"
    response = f"{setting}={rows.longest_response}" if kind == "prompts" else "its response"
    length = rows.longest_prompt + rows.longest_response
    wanted = (
        f"The longest sample has {length} tokens (a prompt of up to {rows.longest_prompt} and "
        f"{response})"
    )
    if limit is not None and length > limit:
        raise ConfigError(
            f"{wanted}, but the model takes {limit}. Lower {setting}, or leave long rows out "
            "with data.max_prompt_tokens and data.too_long=drop"
            f"{', or raise model.tiny.context' if config.model.path is None else ''}."
        )
    if limit is not None and rows.longest_evaluated > limit:
        raise ConfigError(
            f"eval.sets: the longest prompt with its response has {rows.longest_evaluated} tokens, "
            f"but the model takes {limit}. Lower max_tokens of that set."
        )
    parallel, budget = config.actor.parallel, config.actor.tokens_per_microbatch
    sharing = parallel.ring * parallel.ulysses  # ranks that take the budget each
    needed = -(-length * (2 if kind == "pairs" else 1) // sharing)
    if budget is not None and needed > budget:
        raise ConfigError(
            f"{wanted}, but actor.tokens_per_microbatch={budget}: a sample (or a pair) is "
            f"never cut. Raise actor.tokens_per_microbatch to {needed} or more, or lower "
            f"{setting}."
        )


def remarks_on(config: Config, kind: str, rows: Rows) -> list[str]:
    """What the user should know of few rows: that a step repeats them, and that none are held out.

    Args:
        kind: As of `load_rows`.
    """
    if not load_trainer(config.trainer.name).TRAINS:
        return []
    found = [said] if (said := remark_on_task(config)) else []
    number, wanted = len(rows.training), config.data.prompts_per_step
    if number < wanted and config.data.sampler is None:
        found.append(
            f"data.prompts_per_step={wanted}, and there are {number} {kind} to learn from, so each "
            f"step repeats them. Lower data.prompts_per_step to {number} or less, or add data."
        )
    if rows.held_out is None and evaluates_held_out(config, trains=True):
        found.append(
            f"None of the {number} {kind} are held out, for they are too few, so nothing is "
            "evaluated. Name others to evaluate on by data.eval_path."
        )
    return found


def report_on_rows(config: Config, kind: str, rows: Rows, tokenizer: Any) -> DataReport:
    """Report what the prompts repeat, and the first row as the model reads it.

    Args:
        kind: As of `load_rows`.
    """
    from hybridrl.data.duplicates import HELD_OUT, DataReport, report_on
    from hybridrl.data.environment_tasks import ENVIRONMENT
    from hybridrl.run_files.first_row import show_first_row

    if config.data.task == ENVIRONMENT:  # tasks may differ though their prompts do not
        return DataReport({}, [])
    shown = []
    if not is_served(config.rollout, config.environment):  # a program sends messages of its own
        shown = show_first_row(rows.training, tokenizer)
    kept = {}
    if (held_out := rows.held_out) is not None:
        if kind == "pairs":
            held_out = held_out.take(range(0, len(held_out), 2))  # two rows of each prompt
        kept[HELD_OUT] = held_out
    if load_trainer(config.trainer.name).TRAINS:
        for name, one in eval_sets(config).items():
            if one.data is not None and (prompts := rows.sets[name]) is not None:
                kept[one.setting] = prompts
    report = report_on(rows.training, kept, tokenizer, repeats=kind == "prompts")
    report.figures["first_row"] = [one.figures() for one in shown]
    report.remarks[:0] = [one.sentence() for one in shown]
    return report


def check_by_column(config: Config, held_out: Batch | None) -> None:
    """The column by which evaluations are told apart has to be there.

    Raises:
        ConfigError: if it is not.
    """
    by = config.eval.by_column
    if by is None or held_out is None or by in held_out.columns:
        return
    raise ConfigError(
        f"eval.by_column is `{by}`, but the held-out rows have no such column; they have "
        f"{', '.join(held_out.columns)}.{nearest(by, held_out.columns)}"
    )


def check_normalise_by(config: Config, training: Batch) -> None:
    """The column by which rewards are brought to one scale has to be there.

    Raises:
        ConfigError: if it is not.
    """
    by = config.reward.normalise_by
    if by is None or by in training.columns:
        return
    raise ConfigError(
        f"reward.normalise_by is `{by}`, but the data has no such column; it has "
        f"{', '.join(training.columns)}.{nearest(by, training.columns)}"
    )


def tiny_tokenizer(config: Config) -> Any:
    """That of the tiny model: it knows the characters of the built-in task; with an environment, or
    an endpoint, those of English texts, and has a chat template."""
    from hybridrl.data.character_tokenizer import TEXT, build_tokenizer
    from hybridrl.data.environment_tasks import ENVIRONMENT
    from hybridrl.data.mixture import characters_of

    talks = config.environment.name is not None or config.rollout.serve
    if talks or config.data.task == ENVIRONMENT:
        return build_tokenizer(TEXT, chat=True)
    return build_tokenizer(characters_of(config.data))


def _make_tiny_model(config: Config, folder: Path) -> Path:
    from hybridrl.models import make_tiny_model

    tiny = config.model.tiny
    if tiny.hidden_size % (HEAD_DIM_STEP * tiny.heads):
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} must be a multiple of "
            f"{HEAD_DIM_STEP} x model.tiny.heads={tiny.heads}: vLLM's attention kernels take "
            "heads of 32, 64, 96 ... dimensions."
        )
    tokenizer = tiny_tokenizer(config)
    with explain_write_errors(folder):
        return make_tiny_model(folder, tokenizer, seed=config.run.seed, **asdict(tiny))


def _longest(batches: Sequence[Batch], names: Sequence[str]) -> int:
    """Row of these columns, in tokens."""
    lengths = [b.lengths(name) for b in batches for name in names if name in b.columns]
    return max(int(found.max()) for found in lengths)
