"""Whatever stands on the command line, it is a configuration or a sentence.

`HYBRIDRL_FUZZ_MINUTES=30` looks for longer, and starts at another place each time.
"""

import contextlib
import os
import string

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrl.checks.check_list import check
from hybridrl.composition.aliases import foreign_settings
from hybridrl.composition.load import format_config_yaml
from hybridrl.composition.setting_names import OPEN_SETTINGS, list_settings
from hybridrl.config.constraints import OneOf, OneOrMoreOf
from hybridrl.config.presets import DEFAULT_PRESETS, list_presets
from hybridrl.config.schema import OptimizerConfig, ParallelConfig
from hybridrl.config.setting_types import (
    is_optional,
    list_constraints,
    read_type_hints,
    strip_annotations,
)
from hybridrl.errors import HybridRLError
from hybridrl.job.config_resolution import load_config

MINUTES = float(os.environ.get("HYBRIDRL_FUZZ_MINUTES", "0"))
pytestmark = pytest.mark.timeout(0 if MINUTES else 600)
HERE = ["executor=inline", "rollout=transformers"]
WORDS = [
    "null",
    "true",
    "nan",
    ".inf",
    "auto",
    "grpo",
    "ppo",
    "exact",
    "[]",
    "{}",
    "''",
    "???",
    "~",
]
WORDS += [
    "0",
    "1",
    "-1",
    "2",
    "0.5",
    "1e-6",
    "1e23",
    "[1,2]",
    "[a,b]",
    "{a: 1}",
    "${run.seed}",
    "a,b",
]
WORDS += [
    "${oc.env:HOME}",
    "${",
    "/no/such",
    "x.py:f",
    "os:getcwd",
    "=",
    "'",
    "[",
    "[[1],[2]]",
    "cpu",
]
PRESETS = [f"{group}={name}" for group in DEFAULT_PRESETS for name in list_presets(group)]

own = st.sampled_from(
    [f"{name}.{below}" for name in OPEN_SETTINGS for below in ("a", "critic.path", "x.y")]
)
known = st.sampled_from(
    [*list_settings(), *DEFAULT_PRESETS, "actor", "model.tiny", "cost", "models.critic"]
)
strange = st.one_of(
    st.sampled_from([name for row in foreign_settings() for name in row.names]),
    st.text(string.printable, max_size=12),
)
values = st.one_of(
    st.sampled_from(WORDS), st.text(max_size=12), st.integers().map(str), st.floats().map(repr)
)
keys = st.one_of(known, known, known, own, strange)
prefixes = st.sampled_from(["", "", "", "", "+", "++", "~"])
overrides = st.one_of(
    st.builds("{}{}={}".format, prefixes, keys, values),
    st.builds("{}={}".format, known, values),
    st.sampled_from(PRESETS),
    st.text(max_size=12),
)


def of_type(name, hint):
    """Overrides whose value may well be right."""
    kind = strip_annotations(hint)
    choices = [b.names for b in list_constraints(hint) if isinstance(b, OneOf | OneOrMoreOf)]
    if choices:
        value = st.sampled_from(choices[0])
    elif kind is int:
        value = st.sampled_from([0, 1, 2, 3, 4, 8, 20, 10**6])
    elif kind is float:
        value = st.one_of(st.sampled_from([0, 0.5, 1, 2, 30]), st.floats(0, 1))
    elif kind is bool:
        value = st.booleans()
    elif kind is str:
        value = st.sampled_from(["exact", "prompt", "grpo", "ppo", "/tmp", "a b", "json:loads"])
    else:
        value = st.sampled_from(["[]", "{}", "[a, b]", "[0.5, 0.5]", "[1]", "exact", "{a: {b: 1}}"])
    null = st.just("null") if is_optional(hint) else st.nothing()
    return st.builds(f"{name}={{}}".format, st.one_of(value, null))


likely = st.one_of([of_type(*leaf) for leaf in list_settings().items()])
inner = [
    of_type(f"models.{role}.parallel.{n}", h)
    for role in ("critic", "reference")
    for n, h in read_type_hints(ParallelConfig).items()
]
inner += [
    of_type(f"models.critic.optimizer.{n}", h) for n, h in read_type_hints(OptimizerConfig).items()
]
inner += [
    st.sampled_from(
        [
            "placement.roles.actor.devices=[0]",
            "placement.roles.actor.share=0.5",
            "reward.options.exact.a=1",
            "algorithm.loss_options.tau_positive=2",
        ]
    )
]


LOOK = settings(
    max_examples=int(MINUTES * 400) or 60,
    derandomize=not MINUTES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


def try_all(arguments):
    with contextlib.suppress(HybridRLError):
        config = load_config([*HERE, *arguments])
        format_config_yaml(config)
        check(config)


@pytest.mark.more
@LOOK
@given(st.lists(overrides, min_size=1, max_size=4))
def test_whatever_is_written_is_a_configuration_or_a_sentence(arguments):
    try_all(arguments)


@pytest.mark.more
@LOOK
@given(st.sampled_from(PRESETS), st.lists(st.one_of(likely, likely, *inner), max_size=4))
def test_settings_of_the_right_kind_are_a_job_or_a_sentence(chosen, arguments):
    try_all([chosen, *arguments])
