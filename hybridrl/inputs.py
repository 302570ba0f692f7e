"""What a job is built from: a model's folder and rows of data, and whether they fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, nearest
from hybridrl.observe.storage import explain_write_errors
from hybridrl.trainers import load_trainer, name_of
from hybridrl.trainers.role_spec import SCORING, RoleSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from hybridrl.core.batch import Batch
    from hybridrl.trainers.base import Trainer

HEAD_DIM_STEP = 32


@dataclass(frozen=True)
class Rows:
    """Tokenized data.

    Attributes:
        training, held_out: Of the kind that the trainer learns from.
        examples: Prompts with right responses; None where the data has none.
        longest_prompt, longest_response: In tokens; responses that are generated are as long as
            they may be.
    """

    training: Batch
    held_out: Batch | None
    examples: Batch | None
    longest_prompt: int
    longest_response: int


def model_folder(config: Config, run: Path) -> str:
    """Folder or hub name of the model; a tiny one is made in the run's folder if none is named."""
    return config.model.path or str(_make_tiny_model(config, run / "initial_model"))


def load_rows(config: Config, kind: str, tokenizer: Any) -> Rows:
    """The data.

    Args:
        kind: `prompts`, `examples` or `pairs`, as `Trainer.DATA` says.
    """
    from hybridrl.data.preferences import samples_of_pairs
    from hybridrl.data.sources import check_apart, load_examples, load_pairs, load_prompts

    if load_trainer(config.trainer.name).TRAINS:
        check_apart(config.data)
    settings = {"held_out": config.eval.prompts, "seed": config.run.seed}
    examples = None
    if kind == "prompts":
        training, held_out, examples = load_prompts(config.data, tokenizer, **settings)
    elif kind == "examples":
        training, held_out = load_examples(config.data, tokenizer, **settings)
    else:
        training, held_out = load_pairs(config.data, tokenizer, **settings)
        held_out = None if held_out is None else samples_of_pairs(held_out)
    batches = [training] if held_out is None else [training, held_out]
    response = config.rollout.max_tokens
    if kind != "prompts":
        response = _longest(batches, ("response_ids", "chosen_ids", "rejected_ids"))
    return Rows(training, held_out, examples, _longest(batches, ("prompt_ids",)), response)


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
        rows = replace(config.data, task=None, path="data.parquet", split=None)
        config = replace(config, data=rows)
    if trainer is not None:
        if not isinstance(trainer, type):
            raise ConfigError(
                f"Job(trainer={trainer!r}): must be a class. Names go into the settings: "
                "trainer.name=..."
            )
        config = replace(config, trainer=replace(config.trainer, name=name_of(trainer)))
    return config


def write_rows(rows: Any, file: Path) -> str:
    """Writes rows that were given as objects where workers and later runs find them.

    Args:
        rows: A list of dictionaries, a `datasets.Dataset`, or a `Batch`.

    Returns:
        The path.

    Raises:
        ConfigError: if they are none of these.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    from hybridrl.core.batch import Batch

    if isinstance(rows, Batch):
        table = rows.table
    elif hasattr(rows, "with_format") and hasattr(rows, "column_names"):  # a datasets.Dataset
        table = rows.with_format("arrow")[:]
    elif isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        try:
            table = pa.Table.from_pylist(list(rows))
        except (pa.ArrowException, OverflowError, UnicodeError) as error:
            raise ConfigError(
                f"Job(data=...): the values of a column must be of one kind: {error}"
            ) from error
    else:
        raise ConfigError(
            f"Job(data=...) is a {type(rows).__name__}; it must be a list of dictionaries with at "
            "least one row, a datasets.Dataset, or a hybridrl.Batch."
        )
    with explain_write_errors(file):
        pq.write_table(table, file)
    return str(file.absolute())


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
            "with data.max_prompt_tokens and data.too_long=drop."
        )
    parallel, budget = config.actor.parallel, config.actor.tokens_per_microbatch
    sharing = parallel.ring * parallel.ulysses  # ranks that take the budget each
    needed = -(-length * (2 if kind == "pairs" else 1) // sharing)
    if needed > budget:
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
    found, number, wanted = [], len(rows.training), config.data.prompts_per_step
    if number < wanted and config.data.sampler is None:
        found.append(
            f"data.prompts_per_step={wanted}, and there are {number} {kind} to learn from, so each "
            f"step repeats them. Lower data.prompts_per_step to {number} or less, or add data."
        )
    if rows.held_out is None:
        found.append(
            f"None of the {number} {kind} are held out, for they are too few, so nothing is "
            "evaluated. Name others to evaluate on by data.eval_path."
        )
    return found


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


def _make_tiny_model(config: Config, folder: Path) -> Path:
    from hybridrl.data.tasks import load_task
    from hybridrl.data.tasks.character_tokenizer import build_tokenizer
    from hybridrl.models import make_tiny_model

    tiny = config.model.tiny
    if tiny.hidden_size % (HEAD_DIM_STEP * tiny.heads):
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} must be a multiple of "
            f"{HEAD_DIM_STEP} x model.tiny.heads={tiny.heads}: vLLM's attention kernels take "
            "heads of 32, 64, 96 ... dimensions."
        )
    tokenizer = build_tokenizer(load_task(config.data.task).CHARACTERS)
    with explain_write_errors(folder):
        return make_tiny_model(folder, tokenizer, seed=config.run.seed, **asdict(tiny))


def _longest(batches: Sequence[Batch], names: Sequence[str]) -> int:
    """Row of these columns, in tokens."""
    lengths = [b.lengths(name) for b in batches for name in names if name in b.columns]
    return max(int(found.max()) for found in lengths)
