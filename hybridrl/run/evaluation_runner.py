"""Running the evaluations of a run: which sets are scheduled, their metrics, and what is recorded
of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.checkpoint.store import COMPLETE_FILE, parse_step_folder
from hybridrl.composition.load import config_to_dict
from hybridrl.config.schema import is_served
from hybridrl.console.evaluation_table import build_evaluation_table, render_plain_table
from hybridrl.evaluation import evaluation_function as own
from hybridrl.evaluation.answer_extraction import resolve_extractor
from hybridrl.evaluation.baseline import EvalBaseline, doubts, estimate_metrics
from hybridrl.evaluation.eval_sets import HELD_OUT_SET, EvalMetric
from hybridrl.evaluation.loaded_sets import LoadedEvalSet
from hybridrl.evaluation.sample_table import SampleTable
from hybridrl.evaluation.scored_samples import (
    collect_sample_table,
    sample_and_score,
)
from hybridrl.rewards.loading import parse_function_list
from hybridrl.run_files.evaluation_log import EvaluationLog, find_latest_by_set
from hybridrl.run_files.provenance import collect_provenance
from hybridrl.trainers.role_spec import ACTOR_ROLE
from hybridrl.trainers.trainer import EvaluationResult

if TYPE_CHECKING:
    from hybridrl.batch.call_record import CallRecord
    from hybridrl.console.run_view import RunView
    from hybridrl.job.job import Job
    from hybridrl.rollout import SamplingSettings
    from hybridrl.trainers.trainer import Trainer


class EvaluationRunner:
    """Runs the evaluations of a job and records them.

    Args:
        job: The job, its groups built.
        trainer: Its driver program.
        view: Where progress is shown.
    """

    def __init__(self, job: Job, trainer: Trainer, view: RunView) -> None:
        self.job, self.trainer, self.view = job, trainer, view
        config = job.config
        self.file = EvaluationLog(job.directory.path)
        self._trains = trainer.TRAINS
        self._named = (
            None if config.eval.baseline is None else EvalBaseline.named(config.eval.baseline)
        )
        self._remarked: set[tuple[str, str]] = set()

    def owner(self, figure: str) -> str:
        """Return the set that a metric belongs to."""
        found = re.match(r"(?:[^/]+/)?eval/([^/]+)/", figure)
        return found[1] if found and found[1] in self.job.eval_sets else HELD_OUT_SET

    def is_part(self, figure: str) -> bool:
        """Return whether a metric covers a part of a set's prompts, as `by_column` splits them."""
        name = self.owner(figure)
        return name != HELD_OUT_SET and "/" in figure.partition(f"eval/{name}/")[2]

    def run(
        self, step: int, names: Sequence[str]
    ) -> tuple[dict[str, float], dict[str, Sequence[CallRecord]]]:
        """Evaluate these sets, and write what was found to the run's folder: their figures, and the
        records of the calls for each set, by a sentence that says which they were."""
        job, figures = self.job, dict[str, float]()
        calls: dict[str, Sequence[CallRecord]] = {}
        written: dict[str, dict[str, Any]] = {}
        self.view.phase("evaluating")
        job.publish()
        for name in names:
            if name == HELD_OUT_SET:
                where, (found, entries) = "", self._held_out(step)
            else:
                where, (found, entries) = f" of `{name}`", self._set(job.eval_sets[name], step)
            records = job.beside.called(job.executor.take_records())
            calls[f"evaluation{where} at step {step}"] = records
            figures |= found
            written |= entries
        if written:
            self.file.add(self._entry(step, written))
        return figures, calls

    def show(self) -> None:
        """Show the newest evaluation of each set as a table, if there is more to see than one
        accuracy."""
        config = self.job.config
        if self._trains and not self.job.eval_sets and self._named is None:
            return
        if sets := find_latest_by_set(self.file.read()):
            against = f", against {config.eval.baseline}" if self._named else ""
            table = render_plain_table(build_evaluation_table(sets, f"evaluations{against}"))
            self.view.message("\n".join([table, *self.doubts()]))

    def doubts(self) -> list[str]:
        """Return doubts about the figures of the newest evaluations; see `figures.doubts`."""
        newest = find_latest_by_set(self.file.read()).values()
        return [said for each in newest for said in each.get("doubts", ())]

    def compared(self) -> dict[str, Any]:
        """Return, for the summary, how each metric of the newest evaluations differs from the
        baseline."""
        return {
            f"{name}/{metric}": one["difference"]
            for name, each in find_latest_by_set(self.file.read()).items()
            for metric, one in each["metrics"].items()
            if "difference" in one
        }

    def _held_out(self, step: int) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Return the trainer's metrics of the held-out data, and the entries to record, by role."""
        job, config, held_out = self.job, self.job.config, self.job.held_out
        assert held_out is not None  # else this set is never due
        who = f"`{type(self.trainer).__qualname__}.evaluate`"
        self.trainer.sampling = replace(job.sampling, series=_series(HELD_OUT_SET, step))
        try:
            found = self.trainer.evaluate(job.put(held_out))
        finally:
            self.trainer.sampling = job.sampling
        figures = job.checked.figures(found, who)
        samples = found.samples if isinstance(found, EvaluationResult) else {}
        entries: dict[str, dict[str, Any]] = {}
        k, by = config.eval.samples, config.eval.by_column
        metrics = (
            EvalMetric("accuracy"),
            *((EvalMetric("mean", k), EvalMetric("pass", k)) if k > 1 else ()),
        )
        sampling = job.sampling if k > 1 else job.sampling.greedy()
        extract = resolve_extractor("", None, parse_function_list(config.reward.function))
        for role, drawn in samples.items():
            table = collect_sample_table(drawn, held_out, config.reward.correct_at, extract, by)
            name = _name_role_set(role, HELD_OUT_SET)
            limit = self._limit("rollout", sampling.max_tokens)
            said = doubts(table, "the held-out rows", limit, unscored=not self._trains)
            entries[name] = self._kept(step, name, table, metrics, by, said) | {
                "sampling": _how_drawn(sampling, k),
                "correct_at": config.reward.correct_at,
            }
        # Figures that a program of the user's adds, or gives in place of those of answers.
        further = {name: {"value": value} for name, value in figures.items()}
        for role in samples:
            prefix = "" if role == ACTOR_ROLE else f"{role}/"
            known = entries[_name_role_set(role, HELD_OUT_SET)]["metrics"]
            for name in list(further):
                if name.removeprefix(prefix).removeprefix("eval/") in known:
                    del further[name]
        if further:
            entry = entries.setdefault(HELD_OUT_SET, {"prompts": len(held_out), "metrics": {}})
            entry["metrics"] |= {name.removeprefix("eval/"): one for name, one in further.items()}
        for entry in entries.values():
            entry["data"] = _describe_data(config_to_dict(config)["data"])
        return figures, entries

    def _limit(self, group: str, max_tokens: int) -> str:
        """Return what ended responses with the finish reason `length`."""
        limit = f"{group}.max_tokens={max_tokens}"
        config = self.job.config
        if is_served(config.rollout, config.environment):  # a request may ask for fewer
            return f"max_tokens of the program's request, or {limit}"
        return limit

    def _set(
        self, one: LoadedEvalSet, step: int
    ) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
        """Return the metrics of a set for every role that generates, and the entries to record."""
        figures: dict[str, float] = {}
        entries: dict[str, dict[str, Any]] = {}
        for role in (role for role, spec in self.job.roles.items() if spec.generates):
            name = _name_role_set(role, one.name)
            entry = self._of_function(one, role, step) or self._of_answers(one, role, name, step)
            entries[name] = entry
            prefix = f"eval/{one.name}" if role == ACTOR_ROLE else f"{role}/eval/{one.name}"
            figures |= {f"{prefix}/{key}": m["value"] for key, m in entry["metrics"].items()}
        return figures, entries

    def _of_answers(self, one: LoadedEvalSet, role: str, name: str, step: int) -> dict[str, Any]:
        settings, job = one.settings, self.job
        assert one.rows is not None  # only sets of a function may have none
        actor, reward = job.groups[role], job.groups["reward"]
        prompts = job.put(one.rows)
        sampling = replace(one.sampling, series=_series(one.name, step))
        drawn = [
            sample_and_score(actor, reward, prompts, sampling, settings.own.samples, one.verifier)
        ]
        if any(metric.kind == "accuracy" for metric in settings.metrics) and not drawn[0].greedy:
            greedy = sampling.greedy()
            drawn.append(sample_and_score(actor, reward, prompts, greedy, verifier=one.verifier))
        by = settings.own.by_column
        correct_at = settings.reward.correct_at
        table = collect_sample_table(drawn, one.rows, correct_at, one.extract, by)
        limit = self._limit(settings.setting, one.sampling.max_tokens)
        said = doubts(table, f"`{one.name}`", limit, unscored=True)
        return self._kept(step, name, table, settings.metrics, by, said) | self._how(one, role)

    def _of_function(self, one: LoadedEvalSet, role: str, step: int) -> dict[str, Any] | None:
        """Return the entry made by the user's evaluation function; None if the set has none."""
        settings, job = one.settings, self.job
        if settings.own.function is None:
            return None
        data = settings.data or job.config.data
        groups, sampling = job.groups, replace(one.sampling, series=_series(one.name, step))
        model = own.EvaluatedModel(
            groups[role], groups["reward"], job.put, job.tokenizer, sampling, data, one.verifier
        )
        found = own.run_evaluation_function(
            f"{settings.setting}.function",
            settings.own.function,
            {
                "generate": model.generate,
                "score": model.score,
                "tokenizer": job.tokenizer,
                "step": step,
                "rows": [] if one.rows is None else one.rows.rows_for_users(),
            },
        )
        metrics = {name: {"value": value} for name, value in found.items()}
        return {"metrics": metrics, "function": settings.own.function} | self._how(one, role)

    def _how(self, one: LoadedEvalSet, role: str) -> dict[str, Any]:
        """Return the conditions of an evaluation: data, sampling, reward, threshold."""
        settings, plain = one.settings, config_to_dict(self.job.config)
        own_data = (plain["eval"]["sets"][one.name] or {}).get("data")
        how: dict[str, Any] = {"data": own_data or _describe_data(plain["data"])}
        if settings.is_verified:
            how["reward"] = plain["eval"]["sets"][one.name]["reward"]
        how["sampling"] = _how_drawn(one.sampling, settings.own.samples)
        how["correct_at"] = settings.reward.correct_at
        return how if role == ACTOR_ROLE else how | {"role": role}

    def _kept(
        self,
        step: int,
        name: str,
        samples: SampleTable,
        metrics: Sequence[EvalMetric],
        by: str | None,
        doubts: list[str],
    ) -> dict[str, Any]:
        """Writes samples, and gives the metrics with how sure they are, and why to doubt them."""
        found, directory = estimate_metrics(samples, metrics, by), self.job.directory
        path = directory.write_evaluated(name, step, samples.table)
        entry: dict[str, Any] = {
            "prompts": len(samples.keys),
            "samples": str(path.relative_to(directory.path)),
            "metrics": {metric: one._asdict() for metric, one in found.items()},
        }
        if doubts:
            entry["doubts"] = doubts
        baseline = self._baseline(step, name)
        if baseline is not None:
            entry["baseline"] = baseline.origin(name)
            for metric, one in found.items():
                if difference := baseline.difference(name, metric, one, samples):
                    entry["metrics"][metric]["difference"] = difference
        return entry

    def _entry(self, step: int, sets: dict[str, dict[str, Any]]) -> dict[str, Any]:
        job = self.job
        for name, entry in sets.items():
            baseline = self._baseline(step, name)
            remarks = [*entry.get("doubts", ())] if self._trains else []  # else beside the table
            remarks += [] if baseline is None else [baseline.remark(name, entry)]
            for said in filter(None, remarks):
                kind = name, re.sub(r"\d+", "", said)  # once, whatever the counts are
                if kind not in self._remarked:
                    self._remarked.add(kind)
                    self.view.message(said)
        found = {
            "step": step,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "model": job.model_path,
            "versions": collect_provenance(job.config.run.seed, job.command)["versions"],
            "sets": sets,
        }
        model_step = _parse_model_step(job.model_path)
        return found if model_step is None else found | {"model_step": model_step}

    def _baseline(self, step: int, name: str) -> EvalBaseline | None:
        """Return the baseline of a set: the one that the settings name, else its first
        evaluation."""
        if self._named is not None:
            return self._named if self._named.has(name) else None
        if not self._trains:
            return None
        first = next((e for e in self.file.read() if name in e["sets"] and e["step"] < step), None)
        if first is None:
            return None
        sets = {name: {**first["sets"][name], "step": first["step"]}}
        return EvalBaseline(self.job.directory.path, sets)


def _parse_model_step(path: str) -> int | None:
    """Return the step of the checkpoint that a model folder lies in; None if it lies in none."""
    folder = Path(path).absolute().parent
    return parse_step_folder(folder) if (folder / COMPLETE_FILE).is_file() else None


def _how_drawn(sampling: SamplingSettings, samples: int) -> dict[str, Any]:
    """Return how a set is sampled, for evaluations.json. Earlier runs, which may be baselines, have
    no `min_p`: it is left out where it is 0."""
    found = asdict(sampling) | {"samples": samples}
    unsaid = ("series", "partial", *([] if sampling.min_p else ["min_p"]))
    return {name: value for name, value in found.items() if name not in unsaid}


def _series(name: str, step: int) -> str:
    """Return the name of the random series of a set's samples at a step. It is not that of
    training, so that evaluations change no samples of the steps."""
    return f"evaluation {name} {step}"


def _name_role_set(role: str, name: str) -> str:
    """Return the name of a set in files, with the role's name for other roles than the actor."""
    return name if role == ACTOR_ROLE else f"{role}-{name}"


def _describe_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that say where the job's prompts come from."""
    places = ("task", "path", "split", "eval_path", "eval_split")
    return {name: data[name] for name in places if data.get(name) is not None}
