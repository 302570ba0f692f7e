"""Loading of a job's model folder, tokenizer and rows, with checks that they fit each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.batch.batch import Batch
from hybridrl.checks.check_list import Need, run_checks
from hybridrl.checks.data.row_tests import check_tests
from hybridrl.checks.models.model_folder_checks import check_hub_model
from hybridrl.checks.models.tokenizer_checks import (
    check_tokenizer,
    check_vocabularies,
    remark_on_ends,
)
from hybridrl.checks.settings.environment_checks import check_chat_template
from hybridrl.checks.settings.role_checks import find_model_setting
from hybridrl.config.schema import Config, is_served
from hybridrl.config.task_settings import remark_on_task
from hybridrl.console.first_row import show_first_row
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.data.data_files import find_data_files
from hybridrl.data.duplicates import HELD_OUT_NAME, DuplicateReport, find_duplicates
from hybridrl.data.environment_tasks import ENVIRONMENT_TASK
from hybridrl.data.job_data import JobData, load_job_data, longest
from hybridrl.data.mixture import collect_task_characters
from hybridrl.data.refused_rows import collected
from hybridrl.data.row_keys import TEXT_KEY, TOKENS_KEY, remove_keys
from hybridrl.data.task_blocks import TASK
from hybridrl.data.token_cache import used_by
from hybridrl.environments.environment_pool import EnvironmentPool
from hybridrl.errors import ConfigError, ErrorCollector, HybridRLError
from hybridrl.evaluation.eval_sets import evaluates_held_out, needs_held_out_rows, resolve_eval_sets
from hybridrl.evaluation.loaded_sets import load_eval_sets, longest_evaluated
from hybridrl.system.storage import explain_write_errors
from hybridrl.trainers import load_trainer
from hybridrl.trainers.role_spec import RoleSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_HEAD_DIM_MULTIPLE = 32


@dataclass(frozen=True)
class JobInputs:
    """The model's description, the tokenizer and the rows of a job.

    Attributes:
        model_path: Of the policy; a tiny model's folder where the settings name none.
        model: Its configuration.
        tokenizer_path, tokenizer: That all roles share.
        data: The rows, tokenized.
        sets: Prompts of the sets of `eval.sets`, by their names; None: a function without data.
        longest_evaluated: Prompt and response together, of the sets; 0: there are none.
        remarks: What the user should know of the data, and what reward functions have to say before
            they start.
        report: What the data repeats, for `data-report.json`.
    """

    model_path: str
    model: PretrainedConfig
    tokenizer_path: str
    tokenizer: Any
    data: JobData
    sets: Mapping[str, Batch | None]
    longest_evaluated: int
    remarks: list[str]
    report: Mapping[str, Any]


class LoadingProgress:
    """Passes on what loading tells, each text once, and ends it when the job has ended: it may take
    an hour, in another thread than that which is interrupted."""

    def __init__(self, progress: Callable[[str], None], bar: Callable[[int, int], None]) -> None:
        self._progress, self._bar, self._text, self.is_ended = progress, bar, "", False

    def __call__(self, text: str, done: int = 0, total: int = 0) -> None:
        if self.is_ended:
            raise HybridRLError("The job has ended.")
        if text != self._text:
            self._text = text
            self._progress(text)
        if total:
            self._bar(done, total)


def load_job_inputs(
    config: Config,
    roles: Mapping[str, RoleSpec],
    folder: Path,
    *,
    is_whole: bool = False,
    progress: Callable[..., None] = lambda *_: None,
) -> JobInputs:
    """Load the model's description, the tokenizer and the data, and check whether they fit each
    other and the settings.

    Args:
        folder: Of the run: a tiny model is made in it.
        is_whole: The trainer is the whole program. Programs of the user's may add columns before
            they ask for rewards, so that nothing can be said of reward functions.
        progress: Told what takes long, and of tokenizing how much is done of how much.

    Raises:
        HybridRLError: with everything that is wrong with them.
    """
    from hybridrl.models.lora import check_lora_targets
    from hybridrl.models.model_loading import load_model_config, load_tokenizer
    from hybridrl.models.trained_parts import trained_parts

    trainer, problems = load_trainer(config.trainer.name), ErrorCollector()
    model = tokenizer = rows = None
    remarks: list[str] = []
    report = DuplicateReport({}, [])
    named_models = {find_model_setting(config, role, spec) for role, spec in roles.items()}
    for setting, place in {*named_models, ("model.tokenizer", config.model.tokenizer)}:
        with problems.noted():
            if place is not None:
                check_hub_model(place, setting)
    path = named = config.model.tokenizer or ""
    if not problems:
        with problems.noted():
            path = resolve_model_folder(config, folder)
            model = load_model_config(path)
            check_lora_targets(model, config.actor.lora)
            if trainer.TRAINS:
                adapters = config.actor.lora.rank is not None
                remarks += filter(None, [trained_parts(path, model, adapters=adapters)])
        with problems.noted():
            named = config.model.tokenizer or path
            tokenizer = load_tokenizer(named) if named else None
    if tokenizer is None and config.data.path is not None:
        with problems.noted():
            find_data_files(config.data.path, config.data.split)
    if tokenizer is not None:
        with problems.noted():
            check_vocabularies(config, roles, tokenizer, named)
        with problems.noted():
            if model is not None:
                check_tokenizer(config, tokenizer, model, path)
                if config.data.chat is not False and (said := remark_on_ends(path, tokenizer)):
                    remarks.append(said)
            check_chat_template(config, tokenizer)
            with collected(check_tests(config, progress)) as refused:
                rows, sets = load_job_rows(config, trainer.DATA, tokenizer, progress)
    if config.environment.name is not None and config.data.task != ENVIRONMENT_TASK:
        with problems.noted(), closing(EnvironmentPool(config.environment)) as pool:
            pool.load()  # as its own tasks would have
    evaluated = 0
    if rows is not None:
        evaluated = longest_evaluated(config, sets)
        remarks += list_data_remarks(config, trainer.DATA, rows)
        report = _report_on(config, rows, sets, tokenizer)
        rows = replace(
            rows,
            training=remove_keys(rows.training, TOKENS_KEY, TEXT_KEY),
            held_out=rows.held_out and remove_keys(rows.held_out),
        )
        sets = {name: one and remove_keys(one) for name, one in sets.items()}
        if refused:
            report.figures["left_out"] = {one.place: one.figures() for one in refused}
        is_ours = is_whole and trainer.__module__.startswith("hybridrl.")
        remarks += report.remarks
        remarks += run_checks(
            problems,
            *((Need.DATA, Need.SCORED_DATA) if is_ours else (Need.DATA,)),
            config=config,
            kind=trainer.DATA,
            rows=rows,
            prompts=rows.training,
            held_out=rows.held_out,
            sets=sets,
            longest_evaluated=evaluated,
            model=model,
        )
    problems.raise_if_any()
    assert model is not None and rows is not None
    return JobInputs(path, model, named, tokenizer, rows, sets, evaluated, remarks, report.figures)


def load_job_rows(
    config: Config, kind: str, tokenizer: Any, progress: Callable[..., None] = lambda *_: None
) -> tuple[JobData, dict[str, Batch | None]]:
    """Read the rows that a job learns from or is evaluated on, and those of its sets.

    Args:
        kind: `prompts`, `examples`, `pairs` or `responses`, as `Trainer.DATA` says.
        progress: Told what takes long, and of tokenizing how much is done of how much.
    """
    trains = load_trainer(config.trainer.name).TRAINS
    needs_rows = needs_held_out_rows(config, trains)
    with used_by(config.cache, progress):
        if needs_rows or trains:
            held_out = config.eval.prompts if needs_rows else 0
            data = load_job_data(config, kind, tokenizer, trains=trains, held_out=held_out)
            return data, load_eval_sets(config, tokenizer, data.held_out)
        sets = load_eval_sets(config, tokenizer, None)  # nobody needs the job's own data
    first = next(rows for rows in sets.values() if rows is not None)
    most = (one.own.max_tokens for one in resolve_eval_sets(config).values())
    response = max(limit or config.rollout.max_tokens for limit in most)
    return JobData(first, None, None, longest([first], "prompt_ids"), response), sets


def list_data_remarks(config: Config, kind: str, rows: JobData) -> list[str]:
    """Return remarks on small data sets: a step repeats rows, or none can be held out.

    Args:
        kind: As of `Trainer.DATA`.
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
    if kind == "responses" and len(rows.training["label"].unique()) == 1:
        what = "good" if rows.training["label"][0] else "bad"
        found.append(
            f"All {number} responses to learn from are labelled {what} (data.label_column), so "
            "nothing tells good from bad ones. Add responses of the other label."
        )
    if rows.held_out is None and evaluates_held_out(config, trains=True):
        found.append(
            f"None of the {number} {kind} are held out, for they are too few, so nothing is "
            "evaluated. Name others to evaluate on by data.eval_path."
        )
    return found


def _report_on(
    config: Config, rows: JobData, sets: Mapping[str, Batch | None], tokenizer: Any
) -> DuplicateReport:
    """Report what the prompts repeat, and the first row as the model reads it."""
    trainer = load_trainer(config.trainer.name)
    kind = trainer.DATA
    if config.data.task == ENVIRONMENT_TASK:  # tasks may differ though their prompts do not
        return DuplicateReport({}, [])
    shown = []
    if not is_served(config.rollout, config.environment):  # a program sends messages of its own
        shown = show_first_row(rows.training, tokenizer)
    kept = {}
    if (held_out := rows.held_out) is not None and TASK not in held_out:  # tasks share prompts
        if kind == "pairs":
            held_out = held_out.take(range(0, len(held_out), 2))  # two rows of each prompt
        kept[HELD_OUT_NAME] = held_out
    if trainer.TRAINS:
        for name, one in resolve_eval_sets(config).items():
            if one.data is not None and (prompts := sets[name]) is not None:
                kept[one.setting] = prompts
    report = find_duplicates(rows.training, kept, tokenizer, repeats=kind == "prompts")
    report.figures["first_row"] = [one.figures() for one in shown]
    report.remarks[:0] = [one.sentence() for one in shown]
    return report


def resolve_model_folder(config: Config, run: Path) -> str:
    """Return the folder or hub name of the model; if none is named, make a tiny model in the run's
    folder."""
    return config.model.path or str(_make_tiny_model(config, run / "initial_model"))


def build_tiny_tokenizer(config: Config) -> Any:
    """Build the tokenizer of the tiny model. It has the characters of the built-in task or, with an
    environment or an endpoint, those of English text and a chat template."""
    talks = config.environment.name is not None or config.rollout.serve
    if talks or config.data.task == ENVIRONMENT_TASK:
        return build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    return build_character_tokenizer(collect_task_characters(config.data))


def _make_tiny_model(config: Config, folder: Path) -> Path:
    from hybridrl.models.model_loading import make_tiny_model

    tiny = config.model.tiny
    if tiny.hidden_size % (_HEAD_DIM_MULTIPLE * tiny.heads):
        raise ConfigError(
            f"model.tiny.hidden_size={tiny.hidden_size} must be a multiple of "
            f"{_HEAD_DIM_MULTIPLE} x model.tiny.heads={tiny.heads}: vLLM's attention kernels take "
            "heads of 32, 64, 96 ... dimensions."
        )
    tokenizer = build_tiny_tokenizer(config)
    with explain_write_errors(folder):
        return make_tiny_model(folder, tokenizer, seed=config.run.seed, **asdict(tiny))
