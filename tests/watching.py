"""Steps and evaluations for watchers of a run."""

from hybridrl.run.watchers.watcher import FinishedEvaluation, FinishedStep
from hybridrl.trainers.trainer import StepResult


def finished(number=1, records=(), updates=(), metrics=None, batch=None, groups=()):
    result = StepResult(batch)
    return FinishedStep(number, result, records, updates, dict(metrics or {}), groups)


def evaluated(step, first, now):
    """The held-out rows, with the accuracies before the first step and now."""
    return FinishedEvaluation(step, {"accuracy": now}, accuracy=(first, now))


def watched(watcher, step):
    """What is told of a step; the metrics that the watcher adds join it."""
    said = []
    for finding in watcher.on_step_end(step):
        said.append(finding) if isinstance(finding, str) else step.metrics.update(finding)
    return said
