"""Advice: planted faults are named among the first three with their numbers, and a run that is well
gets no alarm."""

import json

import pyarrow as pa
import pytest
from pyarrow import parquet
from settings import configured
from tiers import few_of

from hybridrl import cli
from hybridrl.batch.call_record import CallRecord, PhaseSpan
from hybridrl.composition.load import format_config_yaml
from hybridrl.planner.machine.device_catalog import add_device_memory
from hybridrl.report.advice import TIP, WARNING
from hybridrl.report.run_evidence import RunEvidence
from hybridrl.report.run_summary import find_advice, summarize_learning, words
from hybridrl.run_files.recorded_steps import RecordedStep, append_recorded_step
from hybridrl.run_files.run_reader import RunReader, open_run
from hybridrl.system.cluster_spec import ClusterSpec

BEGIN = 1_700_000_000.0
STEPS = 12
HEALTHY = {
    "reward/mean": (0.30, 0.60),
    "reward/std": (0.46, 0.49),
    "policy/clip_fraction": (0.0, 0.02),
    "policy/entropy": (0.65, 0.4),
    "policy/grad_norm": (1.5, 1.0),
    "policy/learning_rate": (3e-4, 3e-4),
    "policy/skipped_updates": (0.0, 0.0),
    "mismatch/k3": (1e-13, 1e-13),
    "response/length_mean": (3.0, 3.0),
    "response/tokens": (3000.0, 3000.0),
    "response/truncated": (0.0, 0.0),
    "reward/failures": (0.0, 0.0),
    "time/step": (4.0, 4.0),
}
"""Of the built-in task, at first and at last."""
SECONDS = {"generate": 1.0, "score": 0.1, "train": 2.0}
MIXED = [[0.0, 1.0, 0.0, 1.0], [1.0, 1.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]]
LENGTHS = [3, 2, 2, 3]


def advise(folder):
    return find_advice(RunEvidence(RunReader(folder)))


def what_was_learned(folder):
    return summarize_learning(RunEvidence(RunReader(folder)))


def steps_of(seconds, devices=((0,), (0,)), tokens=8600):
    """Generation and scores on the first devices, updates on the others."""
    generating, training = devices
    at, number = 0.0, 0
    for step in range(1, STEPS + 1):
        begin, records = at, []
        for role, phase, places in (
            ("actor" if generating == training else "generator", "generate", generating),
            ("reward", "score", generating),
            ("actor", "train", training),
        ):
            number += 1
            for rank, host in enumerate(places):
                record = CallRecord(role, rank, "m", BEGIN + at, BEGIN + at + seconds[phase])
                record.spans = [PhaseSpan(phase, record.start, record.end)]
                record.call, record.host, record.tokens = number, host, tokens
                record.reads, record.waited = ((number - 1,) if phase != "generate" else ()), 0.0
                record.phases[phase] = seconds[phase]
                records.append(record)
            at += seconds[phase]
        yield RecordedStep(step, BEGIN + begin, BEGIN + at, records, {})


@pytest.fixture
def run_of(tmp_path):
    """A folder as a run leaves it, but for what is given."""

    def make(overrides=(), metrics=(), later=(), scores=MIXED, number=1, lengths=LENGTHS, **steps):
        folder = tmp_path / "run"
        (folder / "samples").mkdir(parents=True)
        config = configured([f"num_devices={number}", *overrides])
        (folder / "config.yaml").write_text(format_config_yaml(config))
        cluster = add_device_memory(ClusterSpec.of_one_node("cpu", number))
        (folder / "cluster.json").write_text(cluster.to_json())
        everywhere = {"devices": list(range(number))}
        roles = {"actor": everywhere, "reward": everywhere}
        (folder / "placement.json").write_text(json.dumps({"roles": roles}))
        rows = {**HEALTHY, **dict(metrics)}
        with (folder / "metrics.jsonl").open("w") as file:
            for step in range(1, STEPS + 1):
                part = (step - 1) / (STEPS - 1)
                row = {name: a + (b - a) * part for name, (a, b) in rows.items()}
                row |= dict(later) if step > 1 else {}
                file.write(json.dumps({"step": step, **row}) + "\n")
        groups = [group for _ in range(10) for group in scores]
        table = {
            "group_id": [number for number, group in enumerate(groups) for _ in group],
            "scores": [score for group in groups for score in group],
            "tokens": [length for _ in groups for length in lengths],
            "prompt": ["1+1="] * sum(map(len, groups)),
            "response": ["2"] * sum(map(len, groups)),
        }
        parquet.write_table(pa.table(table), folder / "samples" / "step-000010.parquet")
        for step in steps_of(**{"seconds": SECONDS} | steps):
            append_recorded_step(folder, step)
        return folder

    return make


APART = {"devices": ((0,), (1,)), "number": 2}
FAULTS = {
    "dead groups": ({"scores": [[1.0] * 4, [0.0] * 4, [0.0] * 4]}, "zero variance", "dead_share"),
    "one score for all": (
        {
            "scores": [[1.0] * 4],
            "metrics": {"reward/mean": (1.0, 1.0), "reward/std": (0.0, 0.0)},
        },
        "100% of 10 groups have zero variance",
        "dead_share",
    ),
    "slow reward": ({"seconds": SECONDS | {"score": 3.0}}, "reward functions take 50%", "change"),
    "tiny micro-batches": (
        {"overrides": ["actor.tokens_per_microbatch=64"]},
        "micro-batches are tiny: 64 tokens",
        "micro_batches",
    ),
    "too high a rate": (
        {"metrics": {"reward/mean": (0.6, 0.01), "policy/entropy": (0.65, 3.0)}},
        "the reward fell from",
        "learning_rate",
    ),
    "too high a rate from the first update on": (
        {
            "overrides": ["data.prompts_per_step=16"],
            "metrics": {"reward/mean": (0.3, 0.3), "reward/std": (0.46, 0.46)},
            "later": {"reward/mean": 0.0, "reward/std": 0.0},
            "scores": [[0.0] * 4],
        },
        "the reward fell from 0.3 to 0",
        "learning_rate",
    ),
    "clipped": (
        {"metrics": {"policy/clip_fraction": (0.1, 0.5)}},
        "clip fraction is 0.4",
        "clip_fraction",
    ),
    "mismatch": ({"metrics": {"mismatch/k3": (1e-4, 5e-2)}}, "mismatch KL", "k3_last"),
    "old samples": (
        {"metrics": {"mismatch/k3": (1e-4, 1e-1), "staleness/max": (1.0, 1.0)}},
        "nats a token, at a staleness of up to 1",
        "staleness",
    ),
    "samples carried for long": (
        {
            "metrics": {
                **{"mismatch/k3": (1e-4, 1e-1), "staleness/max": (4.0, 4.0)},
                "partial/carried": (0.5, 0.5),
            }
        },
        "nats a token, at a staleness of up to 4",
        "staleness",
    ),
    "idle pool": (
        {"overrides": ["placement=separation"], **APART},
        "most of all waiting for actor.update",
        "change",
    ),
    "answers cut": (
        {"metrics": {"response/truncated": (0.2, 0.5)}},
        "of the responses end at the limit",
        "truncated",
    ),
    "reward by length": (
        {
            "metrics": {"reward/mean": (3, 9), "response/length_mean": (3, 9)},
            "scores": [[3.0, 2.0, 2.0, 3.0]],
        },
        "length itself seems to be rewarded",
        "correlation",
    ),
    "numbers that are not finite": (
        {"metrics": {"policy/skipped_updates": (0.0, 1.0)}},
        "updates were left out",
        "skipped",
    ),
}


@pytest.mark.parametrize("fault", few_of(FAULTS, 3))
def test_a_fault_is_named_first(run_of, fault):
    changes, said, number = FAULTS[fault]
    found = advise(run_of(**changes))
    named = [advice for advice in found[:3] if said in advice.title]
    assert named, [advice.title for advice in found]
    assert named[0].kind == WARNING and number in named[0].numbers
    assert named[0].action.endswith(".")
    assert [a.weight for a in found] == sorted((a.weight for a in found), reverse=True)


def test_samples_that_partial_rollouts_carried_are_not_blamed_on_the_placement(run_of):
    changes, said, _ = FAULTS["samples carried for long"]
    (advice,) = (advice for advice in advise(run_of(**changes)) if said in advice.title)
    assert "rollout.partial_steps" in advice.action and "placement" not in advice.action


@pytest.mark.parametrize(
    "healthy",
    [
        {},
        {"seconds": {"generate": 3.0, "score": 0.1, "train": 1.0}},
        {"number": 2, "devices": ((0, 1), (0, 1))},
        {"metrics": {"reward/mean": (0.6, 0.95)}, "scores": [[1.0] * 4] * 19 + [[0, 1, 1, 1]]},
        {"metrics": {"reward/mean": (0.6, 1.0)}, "scores": [[1.0] * 4]},
        {"metrics": {"mismatch/k3": (0.0, 2e-2), "staleness/max": (1.0, 1.0)}},
        {
            "overrides": ["data.prompts_per_step=16"],
            "metrics": {"reward/mean": (0.06, 0.06), "reward/std": (0.24, 0.24)},
            "later": {"reward/mean": 0.01, "reward/std": 0.1},
        },
    ],
    ids=[
        *("default", "long generation", "two devices", "solved", "all solved"),
        *("stale as asked", "one lucky prompt"),
    ],
)
def test_a_healthy_run_gets_no_alarm(run_of, healthy):
    assert {advice.kind for advice in advise(run_of(**healthy))} <= {TIP}


def test_predictions_come_from_the_replay(run_of):
    """Three of six seconds are scores; four times as fast, 2.25 s less."""
    seconds = {"generate": 1.0, "score": 3.0, "train": 2.0}
    (advice, *_) = advise(run_of(seconds=seconds, number=2, devices=((0, 1), (0, 1))))
    assert advice.numbers["change"] == pytest.approx(-2.25 / 6, abs=0.01)
    assert "reward.processes=4" in advice.action and "38% less" in advice.action
    assert advice.numbers["overlapped"] == pytest.approx(-5 / 6 / 6, abs=0.01)
    assert "up to 14% less" in advice.action


def test_one_device_is_not_told_to_be_two(run_of):
    (advice, *_) = advise(run_of(seconds=SECONDS | {"score": 3.0}))
    assert "reward.processes=4" in advice.action and "separation" not in advice.action


ALIKE = [[1.0] * 4, [0.0] * 4, [0.0] * 4]


@pytest.mark.more
@pytest.mark.parametrize(
    "algorithm", ["ppo", "safe_rlhf", "remax", "expert_iteration", "reinforce_plus_plus"]
)
def test_groups_that_score_alike_are_no_loss_to_what_does_not_compare_them(run_of, algorithm):
    found = advise(run_of(overrides=[f"algorithm={algorithm}"], scores=ALIKE))
    assert not [advice for advice in found if "zero variance" in advice.title]


@pytest.mark.parametrize(
    ("overrides", "cures", "refused"),
    [
        ([], ["dynamic_sampling=true", "warmup.steps"], []),
        (["algorithm=online_dpo"], ["more samples of each"], ["dynamic_sampling"]),
        (
            ["data=jsonl", "data.path=p.jsonl", "warmup.steps=0"],
            ["easier prompts, or have them replaced"],
            ["warmup"],
        ),
        (["data=mixture", "data.sources.sums.task=arithmetic"], ["warmup.steps"], []),
    ],
    ids=["default", "pairs", "data without a task", "a mixture with a task"],
)
def test_cures_of_groups_that_score_alike_are_settings_that_the_job_takes(
    run_of, overrides, cures, refused
):
    (advice,) = [
        advice
        for advice in advise(run_of(overrides=overrides, scores=ALIKE))
        if "zero variance" in advice.title
    ]
    assert all(cure in advice.action for cure in cures)
    assert not any(word in advice.action for word in refused)


def test_evaluations_that_were_not_made_are_not_said_to_stand_still(run_of):
    longer = {"reward/mean": (0.1, 0.9), "response/length_mean": (3, 9)}
    folder = run_of(metrics=longer)
    assert "no evaluation tells of more" in advise(folder)[0].title
    same = {"accuracy": {"value": 0.4, "low": 0.3, "high": 0.5}}
    entries = [{"step": step, "sets": {"held_out": {"metrics": same}}} for step in (0, 12)]
    (folder / "evaluations.json").write_text(json.dumps({"format": 1, "evaluations": entries}))
    assert "evaluations did not rise" in advise(folder)[0].title


def test_tokens_of_tools_are_no_padding(run_of):
    scores = [[3.0, 2.0, 2.0, 3.0]]  # as their lengths are
    found = advise(run_of(["rollout.episode=tool.py:Tool"], scores=scores))
    assert not [advice for advice in found if "length itself" in advice.title]


def test_a_spike_has_its_step_where_another_has_no_norm(run_of):
    folder = run_of()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    del rows[2]["policy/grad_norm"]
    rows[8]["policy/grad_norm"] = 500.0
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    titles = [advice.title for advice in advise(folder)]
    assert [title for title in titles if "rose to 500 at step 9," in title], titles


def test_pools_that_take_turns_are_told_what_overlap_would_bring(run_of):
    found = advise(run_of(overrides=["placement=separation"], **APART))
    (generating,) = [advice for advice in found if advice.title.startswith("device 0")]
    assert generating.numbers["idle"] == pytest.approx(2.0 / 3.1, abs=0.01)
    assert generating.numbers["change"] == pytest.approx(-1.1 / 3.1, abs=0.01)
    assert "placement.staleness=1" in generating.action


def test_what_was_learned_is_told_in_words(run_of):
    folder = run_of()
    sure = {"accuracy": {"value": 0.4, "low": 0.3, "high": 0.5}}
    surer = {"accuracy": {"value": 0.8, "low": 0.7, "high": 0.9}}
    entries = [
        {"step": step, "sets": {"held_out": {"metrics": metrics}}}
        for step, metrics in ((0, sure), (12, surer))
    ]
    (folder / "evaluations.json").write_text(json.dumps({"format": 1, "evaluations": entries}))
    reward, accuracy, time = what_was_learned(folder)
    assert reward.startswith("In 12 steps the mean reward went from 0.341 to 0.559")
    assert accuracy == (
        "held_out accuracy went from 0.4 (0.3 to 0.5) at step 0 to 0.8 (0.7 to 0.9) at step 12: "
        "better, beyond chance."
    )
    surer["accuracy"] |= {"low": 0.45, "difference": {"p": 0.01, "baseline": 0.4}}
    (folder / "evaluations.json").write_text(json.dumps({"format": 1, "evaluations": entries}))
    assert what_was_learned(folder)[1].endswith("better, compared prompt by prompt (p = 0.01).")
    surer["accuracy"]["difference"]["p"] = 0.2
    (folder / "evaluations.json").write_text(json.dumps({"format": 1, "evaluations": entries}))
    assert what_was_learned(folder)[1].endswith("the intervals overlap.")
    assert "actor.update 65%, actor.generate 32%" in time


def test_a_folder_with_little_in_it_says_so(tmp_path):
    assert advise(tmp_path) == []
    assert what_was_learned(tmp_path) == ["The run has not done a step yet."]


@pytest.mark.parametrize(
    ("state", "why", "said"),
    [
        (
            "failed",
            "row 45 failed.",
            "The run failed before its first step was done: row 45 failed.",
        ),
        ("interrupted", "", "The run was interrupted before its first step was done."),
        ("finished", "", "The run is over, and no step of training was done."),
    ],
)
def test_a_run_that_ended_without_a_step_says_how(tmp_path, capsys, state, why, said):
    (tmp_path / "config.yaml").write_text("")
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "why": why}))
    assert words(open_run(tmp_path)) == {"learned": [said], "advice": None}
    with pytest.raises(SystemExit):
        cli.main(["top", str(tmp_path)])
    assert said in " ".join(capsys.readouterr().out.split())


def test_a_run_that_failed_later_says_so_first(run_of):
    folder = run_of()
    (folder / "status.json").write_text('{"state": "failed", "why": "no space"}')
    assert what_was_learned(folder)[0] == "The run failed after step 12: no space."


def test_a_doubt_that_is_not_known_is_not_told(run_of):
    folder = run_of()
    (folder / "config.yaml").unlink()
    assert "0.341 to 0.559; responses" in what_was_learned(folder)[0]


def test_top_shows_one_frame_of_a_run_that_is_over(run_of, capsys):
    folder = run_of(metrics={"response/truncated": (0.2, 0.5)})
    (folder / "status.json").write_text('{"state": "finished", "why": ""}')
    with pytest.raises(SystemExit) as done:
        cli.main(["top", str(folder)])
    shown = " ".join(capsys.readouterr().out.split())
    assert done.value.code == 0
    for said in ("step 12/", "finished", "actor reward", "1+1= → 2", "end at the limit"):
        assert said in shown
