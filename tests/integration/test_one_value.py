"""One value for one name: files, tracker, report, page of figures, summary and console of tiny jobs
are compared with each other and with the samples, for every program and kind of episode.

A program is covered by its preset, and a name of a figure by how it begins: neither needs a line.
"""

import importlib
import io
import json
import math
import re
from collections import defaultdict

import pyarrow.parquet as pq
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hybridrl.config.presets import list_presets
from hybridrl.console.console_choice import make_console
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.tasks.arithmetic import CHARACTERS
from hybridrl.job.config_resolution import load_config
from hybridrl.job.job import Job
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.report.prometheus_metrics import render_prometheus_metrics
from hybridrl.report.report_content import ReportContent
from hybridrl.run import loop
from hybridrl.run_files.metric_reader import MetricReader
from hybridrl.run_files.run_reader import open_run

pytestmark = [pytest.mark.more, pytest.mark.usefixtures("process_group")]

SMALL = [
    *("executor=inline", "rollout=transformers", "devices=cpu", "warmup.steps=0"),
    *("data.prompts_per_step=4", "rollout.samples_per_prompt=2"),
    *("eval.prompts=5", "eval.every=1", "trainer.steps=2", "metrics=tensorboard"),
    *("observe.samples_every=1", "observe.show_every=1"),
]
TINY = ["model.tiny={hidden_size: 32, layers: 1, heads: 1}", "rollout.max_tokens=5"]
SAMPLED = [
    "eval.samples=2",
    "eval.sets.other={samples: 2, prompts: 3, metrics: [mean@2, score, length, truncated]}",
]
TEACHER = "models.teacher.path={place}/model"
PLAYED = [
    *("model.path={place}/chat", "data=mixture", "data.sources.a.path={place}/a.jsonl"),
    "data.sources.b.path={place}/b.jsonl",
    *("data.max_prompt_tokens=120", "data.answer_column=null", "reward.function=[]"),
    *("rollout.max_tokens=12", "eval.prompts=3"),
]
KINDS = {
    "distillation": [TEACHER],
    "offline_distillation": [TEACHER],
    "dropped": [
        *("reward.function={place}/own.py:holes", "reward.check={place}/own.py:many"),
        *("reward.on_error=drop", "actor.updates_per_step=2"),
    ],
    "steps": [
        *("reward.function={place}/own.py:steps", "algorithm.step_credit=sum"),
        *("reward.shorter=0.5", "actor.updates_per_step=2"),
    ],
    "episode": [
        *("rollout.episode={place}/own.py:Talk", "reward.function=[]", "rollout.max_tokens=40"),
        *("rollout.max_turn_tokens=5", "model.tiny.context=128"),
    ],
    "environment": [*PLAYED, "environment.name={place}/own.py:play"],
}
"""What presets need, and kinds of samples and episodes of `grpo`."""
OWN = '''
from hybridrl import Turn


def many(prompt, response, **row):
    return {"score": len(response) / 5, "more": float(response[:1] < "5")}


def holes(prompt, response, **row):
    score = sum(map(ord, prompt + response))
    return None if score % 3 == 0 else float(score % 7)


def steps(prompt, response, **row):
    half = len(response) // 2
    found = {"score": float(response[:1] < "5")}
    return found | ({"steps": [[half, 0.75], [2 * half, 0.5]]} if half else {})


class Talk:
    """Says more or less after each of two turns."""

    async def reset(self, row):
        self.turn = 0

    async def step(self, text, ids):
        self.turn += 1
        reward = float(sum(map(ord, text)) % 5)
        return Turn(text="0" * (1 + sum(map(ord, text)) % 9), done=self.turn == 3, reward=reward)


async def play(row, model):
    """Two turns of one conversation, and one of another."""
    messages = [{"role": "user", "content": row["prompt"]}]
    messages.append(await model.chat(messages, max_tokens=4))
    messages.append({"role": "user", "content": "go on"})
    messages.append(await model.chat(messages, max_tokens=4))
    other = await model.chat([{"role": "user", "content": "what was it?"}], max_tokens=3)
    reward = float(other["content"][:1] < "M") + len(messages[1]["content"]) / 8
    return {"reward": reward, "metrics": {"length": len(other["content"])}}
'''
OF_SAMPLES = ("reward/", "cost/", "check/", "response/", "environment/", "episode/")
"""How figures begin that can be worked out from the samples that a step keeps."""
NOT_KEPT = {
    *("reward/failures", "reward/timeouts", "cost/failures", "cost/timeouts", "cost/multiplier"),
    *("response/repeated", "response/observed_tokens"),
    *(f"environment/{kind}" for kind in ("error", "crash", "timeout", "memory", "output")),
}
"""Those of them that samples do not tell."""
SPOKEN = {
    "reward": ("reward/mean", ".3f"),
    "cost": ("cost/mean", ".3f"),
    "loss": ("policy/loss", ".4f"),
    "pair accuracy": ("pairs/accuracy", ".2f"),
    "length": ("response/length_mean", ".1f"),
    "kl": ("policy/kl", ".2g"),
    "entropy": ("policy/entropy", ".2f"),
}
"""Figures as a line of the console has them."""


def programs():
    """A preset of every program that has one, and the kinds of `grpo`."""
    presets = {}
    for name in sorted(list_presets("algorithm"), key=lambda name: (name != "grpo", name)):
        presets.setdefault(load_config([f"algorithm={name}"]).trainer.name, name)
    return [*presets.values(), *(kind for kind in KINDS if kind not in presets.values())]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with models, rows and functions."""
    folder = tmp_path_factory.mktemp("place")
    shape = {"hidden_size": 32, "layers": 1, "heads": 1}
    make_tiny_model(
        folder / "model", build_character_tokenizer(CHARACTERS), seed=7, context=128, **shape
    )
    texts = build_character_tokenizer("".join(map(chr, range(32, 127))) + "\n", chat=True)
    make_tiny_model(folder / "chat", texts, seed=3, context=256, **shape)
    for source in "ab":
        rows = [json.dumps({"prompt": f"{source}: {n} + {n} = ?"}) for n in range(12)]
        (folder / f"{source}.jsonl").write_text("\n".join(rows) + "\n")
    (folder / "own.py").write_text(OWN)
    return folder


class Run:
    """What a run has left, and what it showed."""

    def __init__(self, folder, job, console, shown):
        self.folder, self.console, self.shown = folder, console, shown
        self.correct_at = job.config.reward.correct_at
        self.samples_prompts = job.trainer_class.DATA == "prompts"
        rows = MetricReader(folder / "metrics.jsonl").rows()
        self.steps = {row["step"]: row for row in rows if "time/step" in row}
        self.rows = {row["step"]: row for row in rows}
        self.lines = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
        self.summary = json.loads((folder / "summary.json").read_text())
        self.evaluations = json.loads((folder / "evaluations.json").read_text())["evaluations"]

    def table(self, step):
        return pq.read_table(self.folder / "samples" / f"step-{step:06d}.parquet").to_pylist()

    def newest(self):
        found = {}
        for line in self.lines:
            found |= line
        return {name: value for name, value in found.items() if isinstance(value, float)}


@pytest.fixture(scope="module", params=programs())
def run(request, place, tmp_path_factory):
    name = request.param
    settings = [one.format(place=place) for one in KINDS.get(name, ())]
    chosen = [one for one in settings if one.startswith("data=")]
    chosen += [f"algorithm={name}"] if name in list_presets("algorithm") else []
    program = load_config(chosen).trainer.name
    if importlib.import_module(f"hybridrl.trainers.{program}").Trainer.DATA == "prompts":
        settings = [*SAMPLED, *settings]
    own_model = any(one.startswith("model.path") for one in settings)
    folder = tmp_path_factory.mktemp("runs") / name
    given = [*SMALL, *TINY[own_model:], *settings, f"run.directory={folder}"]
    config = load_config([*chosen, *(one for one in given if one not in chosen)])
    said, shown = io.StringIO(), []
    console = Console(file=said, force_terminal=False)
    with make_console(2, "test", console) as view, Job(config) as job:
        show = view.samples
        view.samples = lambda prompt, found: [shown.append(found), show(prompt, found)]
        loop.RunLoop(job, view).run()
    return Run(folder, job, said.getvalue(), shown)


def same(value):
    return pytest.approx(value, rel=1e-5, abs=1e-6, nan_ok=True)


def mean(values):
    values = [float(value) for value in values]
    return math.fsum(values) / len(values) if values else math.nan


def known(values):
    """Those that are numbers."""
    return [x for x in values if x is not None and not math.isnan(x)]


def test_trackers_and_pages_have_the_figures_of_the_file(run):
    tracked = EventAccumulator(str(run.folder / "tensorboard"), {"scalars": 0}).Reload()
    in_file = {
        (name, line["step"]): value
        for line in run.lines
        for name, value in line.items()
        if name != "step"
    }
    in_tracker = {
        (name, event.step): event.value
        for name in tracked.Tags()["scalars"]
        for event in tracked.Scalars(name)
    }
    assert in_tracker.keys() == in_file.keys()
    for key, value in in_file.items():
        assert in_tracker[key] == same(math.nan if value is None else value), key
    newest = run.newest()
    page = render_prometheus_metrics({run.folder: list(run.rows.values())})
    gauges = re.findall(r"# HELP (\S+) (.+)\n# TYPE .*\n\S+ (.+)\n", page)
    of_page = {name: float(value) for _, name, value in gauges}
    assert {name: of_page.get(name) for name in newest} == newest
    series = ReportContent(open_run(run.folder)).curves()["runs"][0]["series"]
    for name, value in newest.items():
        assert series[name]["y"][-1] == pytest.approx(value, rel=1e-4), name


def test_evaluations_are_those_of_the_file_and_of_their_samples(run):
    in_evaluations = {}
    for entry in run.evaluations:
        for name, one in entry["sets"].items():
            begin = "eval/" if name == "held_out" else f"eval/{name}/"
            for metric, figure in one["metrics"].items():
                is_accuracy = name == "held_out" and metric.startswith("accuracy")
                key = metric if is_accuracy else f"{begin}{metric}"
                in_evaluations[key, entry["step"]] = figure["value"]
            if "samples" in one:
                answers = pq.read_table(run.folder / one["samples"]).to_pylist()
                figures = {metric: figure["value"] for metric, figure in one["metrics"].items()}
                assert {n: figures[n] for n in of_answers(answers, figures)} == {
                    n: same(value) for n, value in of_answers(answers, figures).items()
                }
    in_file = {
        (name, line["step"]): value
        for line in run.lines
        for name, value in line.items()
        if name.startswith(("accuracy", "eval/"))
    }
    assert in_file == in_evaluations and in_file
    newest = ReportContent(open_run(run.folder)).state()["evaluations"]
    assert {name: one["metrics"] for name, one in newest.items()} == {
        name: one["metrics"] for name, one in run.evaluations[-1]["sets"].items()
    }


def of_answers(answers, wanted):
    """Figures of an evaluation, from the samples that it kept."""
    drawn = [row for row in answers if not row["greedy"]] or answers
    prompts = {name: defaultdict(list) for name in ("correct", "score")}
    for row in drawn:
        for name, of_prompt in prompts.items():
            of_prompt[row["row"]].append(row[name])
    right = prompts["correct"].values()
    found = {
        "accuracy": mean(row["correct"] for row in answers if row["greedy"]),
        "mean@2": mean(map(mean, right)),
        "pass@2": mean(map(any, right)),
        "score": mean(known(mean(known(scores)) for scores in prompts["score"].values())),
        "length": mean(row["tokens"] for row in drawn),
        "truncated": mean(row["finish_reason"] == "length" for row in drawn),
    }
    return {name: value for name, value in found.items() if name in wanted}


def test_figures_of_a_step_are_those_of_its_samples(run):
    if not run.samples_prompts:
        return
    for step, row in run.steps.items():
        expected = of_samples(run.table(step), run.correct_at)
        figures = {name: row[name] for name in row if name.startswith(OF_SAMPLES)}
        assert figures.keys() - NOT_KEPT == expected.keys(), (
            "a figure that samples tell is not worked out here, or is not written"
        )
        assert {name: figures[name] for name in expected} == {
            name: same(value) for name, value in expected.items()
        }
        if run.folder.name == "steps":  # two updates, and nothing is dropped or learned again
            assert row["policy/tokens"] == row["response/tokens"]
        if sources := {name.split("/")[1] for name in row if name.startswith("source/")}:
            for name in ("reward/mean", "response/length_mean"):
                of_sources = [
                    row[f"source/{source}/groups"] * row[f"source/{source}/{name}"]
                    for source in sources
                ]
                assert sum(of_sources) / 4 == same(row[name])  # prompts of a step


def of_samples(rows, correct_at):
    """Figures of a step, from the samples that it kept: of each, or of the rows of an episode."""
    if not rows:
        return {}
    samples = defaultdict(list)
    for number, row in enumerate(rows):
        samples[row.get("episode", number)].append(row)
    tokens = [sum(row["tokens"] for row in one) for one in samples.values()]
    firsts = [one[0] for one in samples.values()]
    found = {
        "response/length_mean": mean(tokens),
        "response/length_max": max(tokens),
        "response/tokens": sum(tokens),
        "response/truncated": mean(row["finish_reason"] == "length" for row in firsts),
    }
    if "branch" in firsts[0]:
        found["episode/branches"] = mean(map(len, samples.values()))
        found["episode/turns"] = mean(row["turns"] for row in firsts)
    elif "turns" in firsts[0]:
        found["response/turns"] = mean(row["turns"] for row in firsts)
    for kind, column in (("reward", "scores"), ("cost", "costs")):
        if column not in firsts[0]:
            continue
        scores = known(row[column] for row in firsts)
        found |= {f"{kind}/mean": mean(scores), f"{kind}/std": spread(scores)}
        found[f"{kind}/dropped"] = len(firsts) - len(scores)
        if kind == "reward":
            outcomes = known(row.get("outcomes", row["scores"]) for row in firsts)
            found["reward/correct"] = mean(outcome >= correct_at for outcome in outcomes)
    for name in firsts[0]:
        if name.startswith(OF_SAMPLES):
            values = known(row[name] for row in firsts)
            found |= {name: mean(values), f"{name}/std": spread(values)}
    return found


def spread(values):
    return math.sqrt(max(0.0, mean(x * x for x in values) - mean(values) ** 2))


def test_the_summary_has_the_first_and_the_last_figures(run):
    trained = list(run.steps.values())
    assert run.summary["steps"] == len(trained)
    generated = [v for row in trained for n, v in row.items() if n.endswith("response/tokens")]
    assert run.summary["tokens_generated"] == sum(generated)
    assert ReportContent(open_run(run.folder)).head()["tokens"] == run.summary["tokens_generated"]
    ends = [name.removesuffix("_last") for name in run.summary if name.endswith("_last")]
    assert ends
    for name in ends:
        of_name = (name, f"{name}/mean", f"eval/{name}")
        values = [row[one] for row in run.lines for one in of_name if one in row]
        assert [run.summary[f"{name}_first"], run.summary[f"{name}_last"]] == [
            values[0],
            values[-1],
        ], name


def test_the_console_has_the_figures_of_the_file(run):
    lines = [line for line in run.console.splitlines() if re.match(r"step +\d+/2 \|", line)]
    assert len(lines) == len(run.steps)
    for line, row in zip(lines, run.steps.values(), strict=True):
        parts = [part.strip().rpartition(" ") for part in line.split("|")[1:]]
        spoken = {name: value for name, _, value in parts if name in SPOKEN}
        assert len(spoken) >= 1
        for name, value in spoken.items():
            figure, form = SPOKEN[name]
            assert value == (format(row[figure], form) if figure in row else "-"), (name, line)


def test_samples_that_are_shown_are_those_that_are_kept(run):
    if not run.samples_prompts:
        return
    sources = ReportContent(open_run(run.folder)).parts["samples"]()
    labels = [source["label"] for source in sources["sources"]]
    for (step, _), found in zip(run.steps.items(), run.shown, strict=True):
        table = run.table(step)
        of_report = [one for one in sources["samples"] if labels[one["source"]] == f"step {step}"]
        assert len(of_report) == len(table)
        for reported, row in zip(of_report, table, strict=True):
            expected = {"reward": row["scores"], "length": row["tokens"]}
            expected["advantage"] = row.get("advantage")
            expected |= {"cost": row.get("costs")}
            for name, value in expected.items():
                is_known = value is not None and not math.isnan(value)
                seen = reported.get(name, math.nan)
                assert seen == pytest.approx(value if is_known else math.nan, rel=1e-3, nan_ok=True)
        for one, row in zip(found, table, strict=False):
            score, advantage = row["scores"], row.get("advantage")
            assert one.reward == same(math.nan if score is None else score)
            is_known = advantage is not None and not math.isnan(advantage)
            assert one.advantage == (same(advantage) if is_known else None)
            for name, value in one.parts.items():
                column = next(n for n in row if n.partition("/")[2] == name)
                assert value == same(math.nan if row[column] is None else row[column])
