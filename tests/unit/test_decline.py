"""A fall below the start is told once, when it is more than chance, with its likely cause."""

import re
from dataclasses import replace

import pytest
from watching import evaluated

from hybridrl.config.schema import Config
from hybridrl.run.watchers.evaluation_watchers import AccuracyDeclineWatcher


def told(decline, *accuracies):
    return list(decline.on_evaluation(evaluated(*accuracies)))


def test_chance_is_not_told():
    decline = AccuracyDeclineWatcher(Config(), 100)
    for now in (0.5, 0.9, 0.35):
        assert told(decline, 20, 0.5, now) == []


def test_more_than_chance_is_told_once():
    decline = AccuracyDeclineWatcher(Config(), 100)
    (said,) = told(decline, 20, 0.5, 0.2)
    assert said.startswith("step 20: greedy accuracy has fallen from 0.50 to 0.20")
    assert "100 held-out prompts" in said
    assert told(decline, 40, 0.5, 0.0) == []


def test_certain_answers_that_get_lost_are_told_of_even_few_prompts():
    assert told(AccuracyDeclineWatcher(Config(), 8), 1, 1.0, 0.0)


@pytest.mark.parametrize(
    ("path", "warmup_steps", "cause"),
    [
        ("a-model", 0, "annealed.*actor.optimizer.warmup_steps.*learning_rate=1e-06"),
        ("a-model", 10, "what is rewarded is not what is evaluated.*learning_rate"),
        (None, 0, "what is rewarded is not what is evaluated.*learning_rate"),
    ],
)
def test_the_likely_cause_depends_on_where_the_model_is_from(path, warmup_steps, cause):
    config = Config()
    config.actor.optimizer.warmup_steps = warmup_steps
    config = replace(config, model=replace(config.model, path=path))
    (said,) = told(AccuracyDeclineWatcher(config, 100), 5, 0.9, 0.1)
    assert re.search(cause, said)
