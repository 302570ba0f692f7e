"""A baseline that evaluations are compared with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hybridrl.data.encoding import shorten_value
from hybridrl.evaluation.confidence import (
    MetricDifference,
    MetricEstimate,
    compare_paired,
    compare_unpaired,
    estimate_mean,
)
from hybridrl.evaluation.eval_metrics import compute_metric
from hybridrl.evaluation.eval_sets import EvalMetric
from hybridrl.evaluation.sample_table import SampleTable
from hybridrl.run_files.evaluation_log import find_latest_by_set, load_named_evaluations
from hybridrl.system.storage import to_json

MOST = 0.5
"""Of the responses: from more truncated ones on their scores are doubted."""


def estimate_metrics(
    samples: SampleTable, metrics: Iterable[EvalMetric], by_column: str | None = None
) -> dict[str, MetricEstimate]:
    """Estimate each metric, by name; with a column also `<metric>/<value>` for each of its
    values."""
    found: dict[str, MetricEstimate] = {}
    sources = [] if by_column is None else [str(value) for value in samples.column(by_column)]
    for metric in metrics:
        values = compute_metric(samples, metric)
        if values is None:
            continue
        found[str(metric)] = estimate_mean(values)
        for source in sorted(set(sources)):
            rows = np.asarray([one == source for one in sources])
            found[f"{metric}/{source}"] = estimate_mean(values[rows])
    return found


def doubts(samples: SampleTable, set_name: str, max_tokens: str, *, unscored: bool) -> list[str]:
    """Sentences on figures that say little of the model: most of the responses were cut off, or
    none scored.

    Args:
        set_name: As a person reads it.
        max_tokens: The setting that ends a response, and its value.
        unscored: Whether it is worth a word that none scored above 0.
    """
    kinds = [one for one in (samples.greedy, samples.sampled) if one is not None]
    truncated = np.concatenate([one.truncated.ravel() for one in kinds])
    scores = np.concatenate([one.scores.ravel() for one in kinds])
    found = []
    if truncated.mean() > MOST:
        found.append(
            f"Evaluation of {set_name}: {truncated.sum():.0f} of {len(truncated)} responses ended "
            f"at {max_tokens}, so their scores say little of the model. Raise it."
        )
    known = scores[~np.isnan(scores)]
    if unscored and len(known) and not (known > 0).any():
        answer = (samples.column("answer") if "answer" in samples.table.column_names else [""])[0]
        found.append(
            f"Evaluation of {set_name}: none of {len(known)} responses scored above 0. "
            + (f"The first was held against the answer {shorten_value(answer)}. " if answer else "")
            + "Check the reward function, and how the rows are read (data.answer_column, "
            "data.answer_format)."
        )
    return found


class EvalBaseline:
    """A baseline: an earlier evaluation of this run, or of another one.

    Args:
        folder: Of the run that it is of.
        sets: Its sets, as in `evaluations.json`, each with its `step`.
        name: What it is called; empty: it is this run's own.
    """

    def __init__(self, folder: Path, sets: Mapping[str, Mapping[str, Any]], name: str = "") -> None:
        self._folder, self._sets, self._name = folder, sets, name
        self._samples: dict[str, SampleTable | None] = {}

    @classmethod
    def named(cls, path: str) -> EvalBaseline:
        """Load the newest evaluation of each set of the run that `eval.baseline` names.

        Raises:
            ConfigError: if there is none.
        """
        folder, entries = load_named_evaluations("eval.baseline", path)
        return cls(folder, find_latest_by_set(entries), path)

    def has(self, name: str) -> bool:
        return name in self._sets

    def origin(self, name: str) -> dict[str, Any]:
        """Return the run and step that a set's baseline comes from, for `evaluations.json`."""
        return {"run": self._name or str(self._folder), "step": self._sets[name]["step"]}

    def remark(self, name: str, entry: Mapping[str, Any]) -> str:
        """Return why a set is hard to compare with its baseline: it was evaluated with other
        settings. Empty if it is comparable.

        Args:
            entry: The set as it is evaluated now.
        """
        then = self._sets[name]
        for part in ("sampling", "correct_at"):
            if then.get(part) is not None and then[part] != _normalize_json(entry.get(part)):
                return (
                    f"`{name}` was evaluated with other settings in the baseline ({part} "
                    f"{_format_changes(then[part], entry.get(part))}), so a difference may come "
                    "from that."
                )
        return ""

    def difference(
        self, name: str, metric: str, now: MetricEstimate, samples: SampleTable | None
    ) -> dict[str, Any] | None:
        """Compare a metric of a set with the baseline; None if the baseline does not have it.

        Prompt by prompt where both are on the same prompts, else by their means alone.
        """
        known = self._sets[name]["metrics"].get(metric)
        found = self._paired(name, metric, samples)
        if found is None and known is None:
            return None
        then = _read_estimate(known or {})
        if found is None:
            found = compare_unpaired(now, then)
        value = now.value - found.value if known is None else then.value
        return {**found._asdict(), "baseline": value}

    def _paired(
        self, name: str, metric: str, samples: SampleTable | None
    ) -> MetricDifference | None:
        before = self._read(name)
        asked = EvalMetric.parse(metric)
        if samples is None or before is None or asked is None:
            return None
        places = {key: index for index, key in enumerate(before.keys)}
        if places.keys() != set(samples.keys):
            return None
        now, then = compute_metric(samples, asked), compute_metric(before, asked)
        if now is None or then is None:
            return None
        return compare_paired(now, then[[places[key] for key in samples.keys]])

    def _read(self, name: str) -> SampleTable | None:
        if name not in self._samples:
            file = self._sets[name].get("samples")
            self._samples[name] = SampleTable.read(self._folder / file) if file else None
        return self._samples[name]


def _read_estimate(known: Mapping[str, Any]) -> MetricEstimate:
    numbers = [known.get(name) for name in ("value", "standard_error", "low", "high")]
    value, error, low, high = (float("nan") if one is None else float(one) for one in numbers)
    return MetricEstimate(value, error, low, high, int(known.get("prompts") or 0))


def _normalize_json(value: Any) -> Any:
    """Convert a value to the form in which `evaluations.json` gives it back."""
    return json.loads(to_json(value))


def _format_changes(then: Any, now: Any) -> str:
    if not isinstance(then, Mapping) or not isinstance(now, Mapping):
        return f"{then}, here {now}"
    others = [key for key in now if then.get(key) != _normalize_json(now[key])]
    return ", ".join(f"{key} {then.get(key)}, here {now[key]}" for key in others)
