"""How long samples are, as somebody says or as those of a run were, and what a long tail costs."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings import configured

from hybridrl.errors import ConfigError
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import parse_cluster
from hybridrl.planner.machine.device_rates import DeviceRates
from hybridrl.planner.named_models import materialize_named_models
from hybridrl.planner.sample_lengths import parse_sample_lengths
from hybridrl.planner.step.call_time import RUNNING_SAMPLES_FACTOR, CallTimeEstimator
from hybridrl.planner.step.step_calls import SampleLengths


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ("300+800", SampleLengths(300, 800, 800)),
        ("300+800..4096", SampleLengths(300, 800, 4096)),
        (" 5.5+12.25..12.25 ", SampleLengths(5.5, 12.25, 12.25)),
    ],
)
def test_lengths_are_said_in_numbers(said, expected):
    assert parse_sample_lengths(said, "--lengths") == expected
    assert parse_sample_lengths(str(expected), "--lengths") == expected


@pytest.mark.parametrize(
    "said",
    [
        *("", "300", "300+", "+800", "-3+8", "nan+8", "3+inf", "0+8", "3+0", "300+800..", "3+8..7"),
        *("9" * 400 + "+8", "no/such/run", "x" * 5000, "3+8...9"),
    ],
)
def test_what_says_no_lengths_is_refused(said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"placement\.lengths="):
        parse_sample_lengths(said, "placement.lengths")


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"has no config\.yaml"):
        parse_sample_lengths(str(tmp_path), "--lengths")


def decoding(engine, rows, at_once, response, longest):
    rollout = SimpleNamespace(engine=engine)
    sizes = SimpleNamespace(response_tokens=response, longest_response=longest)
    cluster = SimpleNamespace(devices=[], kind="cpu")
    planner = SimpleNamespace(sizes=sizes, config=SimpleNamespace(rollout=rollout), cluster=cluster)
    return CallTimeEstimator(planner, None)._decoding(rows, at_once)


@given(st.integers(1, 500), st.integers(1, 64), st.floats(1, 100), st.floats(1, 20))
def test_every_token_is_made_once_and_all_wait_for_the_longest(rows, places, response, times):
    at_once, longest = min(rows, places), response * times
    steps, running = decoding("vllm", rows, at_once, response, longest)
    assert steps * running == pytest.approx(rows * response)
    assert steps >= longest * (1 - 1e-9) and running <= at_once * (1 + 1e-9)
    steps, running = decoding("transformers", rows, at_once, response, longest)
    made = rows * response  # finished ones stay until they are half of all
    assert made * (1 - 1e-9) <= steps * running <= RUNNING_SAMPLES_FACTOR * made * (1 + 1e-9)


def test_who_waits_for_a_long_one_generates_longer_and_trains_as_long():
    settings = ["model.path=llama-7b", "data.prompts_per_step=64", "model.dtype=bfloat16"]
    cluster = parse_cluster("8xH100")
    rates = DeviceRates.known(cluster, "bfloat16")
    with materialize_named_models(configured(settings), None) as config:
        plain, tail = (
            build_job_plan(config, cluster, lengths=lengths, rates=rates).times.phases
            for lengths in (SampleLengths.alike(300, 800), SampleLengths(300, 800, 4096))
        )
    assert tail["actor", "train"] == plain["actor", "train"]
    # Five times as many steps, each of which reads all weights, but fewer samples.
    assert 2 < tail["actor", "generate"] / plain["actor", "generate"] < 4096 / 800
