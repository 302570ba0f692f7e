"""What runs record of their steps, and questions that are put to such runs."""

import argparse
import json
from pathlib import Path

import pytest
from settings import configured
from tiers import few_of

from hybridrl import cli
from hybridrl.batch.call_record import CallRecord, PhaseSpan
from hybridrl.commands.whatif_command import parse_question
from hybridrl.composition.load import format_config_yaml
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.errors import ConfigError, DataError
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.planner.machine import cluster_rates
from hybridrl.planner.machine import device_catalog as devices
from hybridrl.planner.sample_lengths import parse_sample_lengths
from hybridrl.planner.step.graph_replay import replay_graph
from hybridrl.planner.what_if import backtest
from hybridrl.planner.what_if.graph_changes import NodeFilter, scale_links, scale_speed
from hybridrl.planner.what_if.questions import WhatIfQuestion, predict_step
from hybridrl.planner.what_if.recorded_graph import build_recorded_graph
from hybridrl.planner.what_if.recorded_run import RecordedRun
from hybridrl.planner.what_if.replanning import resize_cluster
from hybridrl.report.report_tables import replan_memory
from hybridrl.run_files import recorded_steps
from hybridrl.run_files.recorded_steps import (
    RecordedStep,
    append_recorded_step,
    read_recorded_steps,
)
from hybridrl.run_files.run_directory import RunDirectory
from hybridrl.run_files.run_reader import RunReader
from hybridrl.system.cluster_spec import ClusterSpec

BEGIN = 1_700_000_000.0
SHAPE = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 128}
ASKED = {"set": [], "move": [], "scale": [], "fix": None, "overlap": None}
RECIPE = Path(__file__).parents[2] / "recipes" / "gsm8k_grpo_qwen2.5_0.5b" / "config.yaml"


def record(call, role, rank, host, spans, reads=(), waited=0.0, tokens=0):
    """A call that is nothing but its phases, in seconds since `BEGIN`."""
    found = CallRecord(role, rank, "m", BEGIN + spans[0][1], BEGIN + spans[-1][2])
    found.spans = [PhaseSpan(name, BEGIN + s, BEGIN + e, w) for name, s, e, w in spans]
    for name, start, end, _ in spans:
        found.phases[name] += end - start
    found.call, found.host, found.reads, found.waited = call, host, reads, waited
    found.tokens = tokens
    return found


def step(number, at, slow=1.0, waits=(0.2, 1.2)):
    """Four seconds: generation, scores, an update of two ranks of which one is slow, or waits for
    the link alone."""
    call = 10 * number
    train = at + 2.5
    ends = train + 0.3 + 1.2 * slow
    return RecordedStep(
        number,
        BEGIN + at,
        BEGIN + ends,
        [
            record(call, "actor", 0, 0, [("generate", at, at + 2, 0.0)], tokens=300),
            record(call, "actor", 1, 1, [("generate", at, at + 2, 0.0)], tokens=340),
            record(call + 1, "reward", 0, 0, [("score", at + 2, at + 2.5, 0.0)], (call,)),
            record(
                call + 2, "actor", 0, 0, [("train", train, ends, waits[0])], (call + 1,), waits[0]
            ),
            record(
                call + 2, "actor", 1, 1, [("train", train, ends, waits[1])], (call + 1,), waits[1]
            ),
        ],
        {},
    )


SLOW = {
    **{"forward": 1e9, "training": 1e9, "forward_overhead": 1.5e-4, "training_overhead": 4.5e-4},
    **{"memory": 1e9, "link": 1e9, "network": 1e9, "sums": 1.0, "small_op": 1e-5},
}


@pytest.fixture
def run_of(tmp_path, monkeypatch):
    """Folders of runs as they are left behind."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = tmp_path / "model"
    make_tiny_model(model, build_character_tokenizer(PRINTABLE_CHARACTERS), seed=0, **SHAPE)
    monkeypatch.setattr(cluster_rates, "mean_of_all", lambda *job: SLOW)

    def make(name, overrides=(), number=2, steps=None):
        folder = tmp_path / name
        folder.mkdir()
        config = configured([f"model.path={model}", f"num_devices={number}", *overrides])
        (folder / "config.yaml").write_text(format_config_yaml(config))
        cluster = devices.add_device_memory(ClusterSpec.of_one_node("cpu", number))
        (folder / "cluster.json").write_text(cluster.to_json())
        everywhere = {"devices": list(range(number))}
        roles = {"actor": everywhere, "reward": everywhere}
        (folder / "placement.json").write_text(json.dumps({"roles": roles}))
        for one in steps or [step(1, 0.0), step(2, 10.0)]:
            append_recorded_step(folder, one)
        return folder

    return make


def asked(folder, **options):
    run = RecordedRun.at(folder)
    return predict_step(run, parse_question(run, argparse.Namespace(**ASKED | options)))


def test_steps_are_read_as_they_were_written(tmp_path):
    written = [step(1, 0.0), step(2, 4.5)._replace(ahead={1: 0.25})]
    written[0].records[1].beside = True
    for one in written:
        append_recorded_step(tmp_path, one)
    for one, read in zip(written, read_recorded_steps(tmp_path), strict=True):
        assert (read.step, read.ahead) == (one.step, one.ahead)
        assert read.end == pytest.approx(one.end, abs=1e-5)
        for before, after in zip(one.records, read.records, strict=True):
            assert (after.role, after.rank, after.call, after.host, after.reads) == (
                *(before.role, before.rank, before.call, before.host, before.reads),
            )
            assert after.beside == before.beside
            assert after.end == pytest.approx(before.end, abs=1e-5)
            assert after.phases == pytest.approx(before.phases, abs=1e-5)
            assert after.spans[0].waited == before.spans[0].waited


def test_what_is_done_again_is_forgotten_and_a_line_that_was_cut_left_out(tmp_path):
    run = RunDirectory(tmp_path)
    run.forget_after(3)  # there is none
    for number in (1, 2, 3):
        append_recorded_step(tmp_path, step(number, 5.0 * number))
    run.forget_after(2)
    assert [one.step for one in read_recorded_steps(tmp_path)] == [1, 2]
    for cut in ('{"step": 3, "beg', '{"step": 3, "begin": 1.0, "ahead": {}'):
        with (tmp_path / "steps.jsonl").open("a") as opened:
            opened.write(cut)
        assert [one.step for one in read_recorded_steps(tmp_path)] == [1, 2]
        run.forget_after(2)


@pytest.mark.parametrize(
    "change",
    [
        lambda read: read.update(seconds=0),
        lambda read: read.update(seconds=float("nan")),
        lambda read: read.update(step={}),
        lambda read: read["calls"][0].update(device="0"),
    ],
)
def test_a_line_of_something_else_is_named(tmp_path, change):
    append_recorded_step(tmp_path, step(1, 0.0))
    file = tmp_path / "steps.jsonl"
    read = json.loads(file.read_text())
    change(read)
    file.write_text(json.dumps(read) + "\n")
    with pytest.raises(DataError, match=r"line 1: .* is no recorded step"):
        read_recorded_steps(tmp_path)


def test_a_run_that_went_on_counts_from_there(tmp_path):
    for one in (step(1, 0.0), step(2, 5.0), step(1, 9.0)._replace(step=3)):  # its calls begin anew
        append_recorded_step(tmp_path, one)
    assert [one.step for one in read_recorded_steps(tmp_path)] == [3]


def test_the_newest_steps_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded_steps, "_KEPT_BYTES", 4_000)
    for number in range(1, 40):
        append_recorded_step(tmp_path, step(number, 5.0 * number))
    assert (tmp_path / "steps.jsonl").stat().st_size <= 8_000
    read = [one.step for one in read_recorded_steps(tmp_path)]
    assert read == list(range(read[0], 40))


def test_where_nothing_was_recorded_it_is_a_sentence(tmp_path):
    with pytest.raises(DataError, match=r"no steps\.jsonl"):
        read_recorded_steps(tmp_path)
    with pytest.raises(ConfigError, match=r"no config\.yaml"):
        RecordedRun.at(tmp_path)


def test_a_run_is_replayed_as_it_was_without_what_passed_between_its_steps(run_of):
    run = RecordedRun.at(run_of("run", steps=[step(n, 10.0 * n) for n in (1, 2, 3)]))
    assert run.seconds == pytest.approx(4.0)
    found = predict_step(run, WhatIfQuestion())
    assert (found.steps, found.replayed) == (2, pytest.approx(4.0))
    prompt, response, longest = run.lengths
    assert response == longest == run.config.rollout.max_tokens and prompt >= 1


def test_samples_are_as_long_as_those_of_the_steps_that_are_kept(run_of):
    folder = run_of("run", ["data.prompts_per_step=5", "rollout.samples_per_prompt=2"])
    rows = [(1, 500.0, 900.0), (2, 40.0, 90.0)]
    (folder / "metrics.jsonl").write_text(
        "".join(
            json.dumps({"step": n, "response/length_mean": mean, "response/length_max": most})
            + "\n"
            for n, mean, most in rows
        )
    )
    found = parse_sample_lengths(str(folder), "--lengths")
    assert found == (640 / 10 - 40, 40, 90)


@pytest.mark.parametrize(
    ("options", "seconds"),
    few_of(
        [
            ({"scale": ["actor.generate=1.5x"]}, 5.0),
            ({"scale": ["reward=3x"]}, 5.0),
            ({"set": ["link=2x"]}, 3.9),  # 0.2 s of an update are the link's
            ({"fix": "slowest"}, 3.0),  # the other rank works for 0.5 s
            ({"move": ["reward=own"]}, 4.0),  # nothing else could have begun
            ({"overlap": "scoring"}, 4 - 0.5 * 5 / 6),  # a sixth of the scores is left
            ({"overlap": "scoring", "scale": ["reward=6x"]}, 6.5 - 2 * 5 / 6),  # 2 s hide it
        ],
        3,
        several=True,
    ),
)
def test_questions_to_a_run(run_of, options, seconds):
    assert asked(run_of("run"), **options).seconds == pytest.approx(seconds)


@pytest.mark.more
def test_a_setting_counts_as_far_as_the_plan_says(run_of, monkeypatch):
    folder = run_of("run")
    assert asked(folder, set=["observe.show_every=7"]).change == pytest.approx(0.0)
    assert asked(folder, set=["actor.gradient_checkpointing=full"]).change > 0.01
    assert asked(folder, set=["devices=1"]).change > 0.2
    assert asked(folder, set=["devices=4"]).change < -0.1


def test_settings_that_no_plan_has_in_it_are_named(run_of):
    folder = run_of("run")
    assert asked(folder, set=["reward.processes=4"]).unseen == ["reward.processes"]
    both = asked(
        folder, set=["actor.optimizer.learning_rate=1e-5", "actor.tokens_per_microbatch=64"]
    )
    assert both.unseen == ["actor.optimizer.learning_rate"]


def test_other_cuts_and_places_of_roles_are_planned(run_of):
    """Their places are those of the run's file only while nothing else is asked for."""
    folder = run_of("run")
    found = asked(folder, set=["actor.parallel.tp=2"])
    assert not found.unseen and abs(found.change) > 0.01
    apart = ["placement.strategy=explicit", *("placement.roles.actor.devices=[0,1]",)]
    found = asked(folder, set=[*apart, "placement.roles.reward.devices=[1]"])
    places = {node.place for node in found.after.graph.nodes if node.role == "reward"}
    assert places == {1} and not found.unseen


def test_as_many_devices_as_before_change_nothing(run_of):
    folder = run_of("run", ["placement.strategy=auto"])
    assert asked(folder, set=["devices=2"]).change == 0.0
    with pytest.raises(ConfigError, match="would search anew"):
        asked(folder, set=["devices=4"])


@pytest.mark.more
def test_what_a_search_chose_is_of_the_run(run_of):
    folder = run_of("run", ["placement.strategy=auto"])
    as_asked = replan_memory(RunReader(folder))
    file = folder / "placement.json"
    chosen = {"settings": {"actor.gradient_checkpointing": "full"}}
    file.write_text(json.dumps(json.loads(file.read_text()) | chosen))
    assert RecordedRun.at(folder).config.actor.gradient_checkpointing == "full"
    part = "actor", "train"  # of the page of the run, too
    assert replan_memory(RunReader(folder)).phases[part] < as_asked.phases[part]
    for damaged in ({"actor.nothing": 1}, ["full"], {"trainer.name": 3}):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"settings": damaged}))
        assert "plan" in replan_memory(RunReader(folder)).note


@pytest.mark.more
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"set": ["rollout.max_tokens=64"]}, "ask --scale responses=2x"),
        ({"set": ["num_devices=4"]}, "ask --set devices="),
        ({"set": ["algorithm.kl_coefficient=0.1"]}, "would differ by reference"),
        ({"set": ["placement.strategy=separation"]}, "other devices would generate"),
        ({"set": ["rollout.max_tokns=3"]}, "rollout.max_tokens"),
        ({"set": ["trainer.steps=-3"]}, "trainer.steps"),
        ({"set": ["devices=0"]}, "--set devices=0"),
        ({"set": ["link=fast"]}, "400Gbps"),
        ({"set": ["link=100Mbps"]}, "link=2x"),
        ({"set": ["placement=separation"]}, "name one setting"),
        ({"set": [f"recipe={RECIPE}"]}, "name one setting"),
        ({"move": ["critic=own"]}, "actor, reward"),
        ({"move": ["reward=0,0"]}, "names a device twice"),
        ({"move": ["reward=critic"]}, "name devices by their numbers"),
        ({"scale": ["responses=two"]}, "responses=2x"),
        ({"scale": ["reward.train=2x"]}, "reward.score"),
        ({"set": ["devices"]}, "NAME=VALUE"),
    ],
)
def test_what_cannot_be_asked_is_a_sentence(run_of, options, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        asked(run_of("run"), **options)


def test_scores_that_are_overlapped_already_cannot_be(run_of):
    late = step(1, 0.0)
    for one in late.records[:2]:
        one.role = "generator"
    with pytest.raises(ConfigError, match="as they finish"):
        asked(run_of("run", steps=[late]), overlap="scoring")


def test_a_cluster_of_another_size():
    cluster = ClusterSpec.of_one_node("cpu", 2, "a")
    larger = resize_cluster(cluster, 5)
    assert [(one.node, one.index) for one in larger.devices] == [
        *(("a", 0), ("a", 1), ("node 1", 0), ("node 1", 1), ("node 2", 0)),
    ]
    assert resize_cluster(cluster, 1).devices == cluster.devices[:1]
    uneven = ClusterSpec([*cluster.devices[:1], *ClusterSpec.of_one_node("cpu", 2, "b").devices])
    assert resize_cluster(uneven, 3).devices == uneven.devices


def test_predictions_are_compared_and_remembered(run_of, capsys):
    checkpointed = ["actor.gradient_checkpointing=full"]
    slower = [step(1, 0.0, slow=1.2), step(2, 10.0, slow=1.2)]
    one, other = run_of("one"), run_of("other", checkpointed, steps=slower)
    assert backtest.median_error() is None
    cli.load_command("whatif").run(argparse.Namespace(run=str(one), steps=10, json=False, **ASKED))
    assert "no prediction has been compared" in capsys.readouterr().out
    with_runs = ["plan", "--backtest", str(one), str(other), "--json"]
    with pytest.raises(SystemExit):
        cli.main(with_runs)
    found = json.loads(capsys.readouterr().out)
    assert {row["kind"] for row in found} == {"plan", "replay", "whatif"}
    assert all(abs(row["error"]) < 1e-6 for row in found if row["kind"] == "replay")
    asked_of = {row["what"]: row["error"] for row in found if row["kind"] == "whatif"}
    assert set(asked_of) == {"one -> other", "other -> one"}
    assert backtest.median_error() == pytest.approx(sum(map(abs, asked_of.values())) / 2, abs=1e-3)


def weights(call, seconds, waited):
    """A transfer from device 0 to device 1, as both sides see it: they end together at 5 s."""
    sent = record(call, "actor", 0, 0, [("sync", 5 - seconds[0], 5.0, waited[0])], (), waited[0])
    taken = record(
        call + 1, "generator", 0, 1, [("sync", 5 - seconds[1], 5.0, waited[1])], (), waited[1]
    )
    sent.method, taken.method = "send_weights", "receive_weights"
    return [sent, taken]


def test_whoever_receives_weights_waits_for_whoever_sends_them():
    """What comes earlier on the side of the receiver changes nothing, but that it waits less."""
    trains = record(1, "actor", 0, 0, [("train", 0.0, 4.5, 0.0)])
    generates = record(2, "generator", 0, 1, [("generate", 0.0, 2.0, 0.0)])
    records = [trains, generates, *weights(3, (0.5, 3.0), (0.0, 2.5))]
    graph = build_recorded_graph(records, BEGIN, BEGIN + 5.0)
    assert replay_graph(graph).makespan == pytest.approx(5.0)
    longer = scale_speed(graph, NodeFilter("generator", "generate"), 0.5)
    assert replay_graph(longer).makespan == pytest.approx(5.0)
    assert replay_graph(scale_links(graph, 2.0)).makespan == pytest.approx(5.0)


def test_rewards_beside_generation_take_no_time_of_the_device():
    scored = [record(3, "reward", 0, 0, [("score", 5.0, 9.0, 0.0)], [1])]
    scored += [record(4, "reward", 0, 0, [("score", 10.0, 11.0, 0.0)], [2])]
    records = [
        record(1, "actor", 0, 0, [("generate", 0.0, 5.0, 0.0)]),
        record(2, "actor", 0, 0, [("generate", 5.0, 10.0, 0.0)]),
        *scored,
        record(5, "actor", 0, 0, [("train", 11.0, 13.0, 0.0)], [1, 2, 3, 4]),
    ]
    for one in scored:
        one.beside = True
    graph = build_recorded_graph(records, BEGIN, BEGIN + 13.0)
    assert replay_graph(graph).makespan == pytest.approx(13.0), "as long as it took"
    slower = scale_speed(graph, NodeFilter("reward", "score"), 0.25)
    assert replay_graph(slower).makespan == pytest.approx(5 + 16 + 4 + 2)
    assert [node.place for node in graph.nodes if node.role == "reward"] == [1, 1]


@pytest.mark.parametrize("ahead", [0.0, 7.5])
def test_ranks_of_hosts_whose_clocks_differ_end_together(ahead):
    spans = [("train", 0.0, 3.0, 0.2)], [("train", ahead, 3.0 + ahead, 1.2)]
    records = [record(1, "actor", rank, rank, spans[rank]) for rank in range(2)]
    graph = build_recorded_graph(records, BEGIN, BEGIN + 3.0, {1: ahead})
    assert [node.seconds for node in graph.nodes if node.phase == "train"] == pytest.approx([3, 2])
    assert len({node.together for node in graph.nodes if node.phase == "train"}) == 1


def test_what_was_made_before_the_first_step_is_of_no_step(run_of):
    """A step behind: samples of a step are generated while the one before it trains."""
    steps = [step(number, 4.0 * number) for number in (1, 2, 3)]
    for one in steps:
        for call in one.records[:2]:
            call.host += 2  # devices that only generate
            call.start, call.end = call.start - 2.0, call.end - 2.0
            call.spans = [s._replace(start=s.start - 2.0, end=s.end - 2.0) for s in call.spans]
    run = RecordedRun.at(run_of("run", steps=steps))
    assert run.held == pytest.approx(2.5)
    found = predict_step(run, WhatIfQuestion())
    assert found.replayed == pytest.approx(4.0) and found.seconds == found.replayed


def test_thousands_of_devices_are_asked_for_in_seconds(run_of):
    """Each rank goes on where it was, and waits for all of another call by one node."""
    nodes = asked(run_of("run"), set=["devices=1000"]).after.graph.nodes
    assert len(nodes) > 3000 and sum(len(node.after) for node in nodes) < 4 * len(nodes)


def test_runs_that_differ_in_nothing_are_no_prediction(run_of):
    one, other = (RecordedRun.at(run_of(name)) for name in ("one", "other"))
    found = backtest.backtest_runs([one, other, one])
    assert [test.kind for test in found] == ["plan", "replay"] * 2


def test_links_count_whatever_ranks_do_between():
    """One of two ranks has a gap between its phases, and ends later: both wait for the link."""
    gap = [("score", 0.0, 1.0, 0.4), ("train", 1.2, 3.2, 1.0)]
    none = [("score", 0.0, 1.0, 0.6), ("train", 1.0, 3.0, 1.5)]
    records = [record(1, "actor", 0, 0, gap), record(1, "actor", 1, 1, none)]
    graph = build_recorded_graph(records, BEGIN, BEGIN + 3.2)
    found = {(node.rank, node.phase): node.wire for node in graph.nodes if node.wire}
    assert found == pytest.approx(
        {(0, "score"): 0.4, (1, "score"): 0.4, (0, "train"): 1.0, (1, "train"): 1.0}
    )
