"""Metrics of answers, how sure they are, whether two differ, and when a run ends for them."""

import itertools
import json
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from settings import configured

from hybridrl.batch.batch import Batch
from hybridrl.checks.settings.evaluation_checks import EVALUATION_CHECKS
from hybridrl.config.schema import EvalStopConfig
from hybridrl.console.evaluation_table import build_evaluation_table, render_plain_table
from hybridrl.errors import ConfigError
from hybridrl.evaluation import evaluation_function as own
from hybridrl.evaluation.answer_extraction import resolve_extractor
from hybridrl.evaluation.baseline import EvalBaseline, doubts, estimate_metrics
from hybridrl.evaluation.confidence import (
    MetricEstimate,
    compare_paired,
    compare_unpaired,
    estimate_mean,
    mcnemar_p_value,
)
from hybridrl.evaluation.eval_metrics import compute_metric, majority_at_k, pass_at_k
from hybridrl.evaluation.eval_sets import EvalMetric, resolve_eval_sets
from hybridrl.evaluation.loaded_sets import resolve_set_sampling
from hybridrl.evaluation.sample_table import SampleTable
from hybridrl.evaluation.scored_samples import compute_prompt_keys
from hybridrl.rollout import SamplingSettings
from hybridrl.run.watchers.evaluation_watchers import EarlyStopWatcher
from hybridrl.run.watchers.watcher import EndRun, FinishedEvaluation
from hybridrl.run_files.evaluation_log import (
    EvaluationLog,
    find_latest_by_set,
    load_named_evaluations,
)

SET = "eval.sets.math.data.path=math.jsonl"


def samples(scores, greedy=False, keys=None):
    """Of `[prompts][samples]` scores, of which 1 is right."""
    number = len(scores[0])
    flat = [score for row in scores for score in row]
    return SampleTable(
        pa.table(
            {
                "row": [i // number for i in range(len(flat))],
                "key": [(keys or range(len(scores)))[i // number] for i in range(len(flat))],
                "sample": [i % number for i in range(len(flat))],
                "greedy": [greedy] * len(flat),
                "score": flat,
                "correct": [score == 1 for score in flat],
                "tokens": [3] * len(flat),
                "finish_reason": ["stop", "length"] * (len(flat) // 2) + ["stop"] * (len(flat) % 2),
                "extracted": ["a"] * len(flat),
            }
        )
    )


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.data())
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(right, data):
    k = data.draw(st.integers(1, len(right)))
    subsets = list(itertools.combinations(right, k))
    expected = sum(map(any, subsets)) / len(subsets)
    found = pass_at_k(np.array([sum(right)]), len(right), k)
    assert found[0] == pytest.approx(expected)


def test_a_majority_is_right_as_often_as_its_tied_answers_are():
    right = np.array([[True, False, True, False], [False] * 4, [True, True, False, True]])
    answers = [["5", "6", "5", "7"], [None] * 4, ["1", None, "2", "1"]]
    # 5 has two votes and is right; nobody votes; 1 has two and is right.
    assert majority_at_k(answers, right, 4).tolist() == [1, 0, 1]
    # Pairs: 5 ties with 6, 5 with 7; none; 1 alone, 2 ties with 1.
    assert majority_at_k(answers, right, 2).tolist() == [0.5, 0, 0.75]
    # A lonely last sample is left over.
    assert majority_at_k(answers, right, 3).tolist() == [1, 0, 0.5]


def test_what_is_measured_of_samples():
    found = samples([[1.0, 0.0, math.nan], [0.5, 0.5, 0.5]])
    means = {str(m): compute_metric(found, m) for m in (EvalMetric("mean", 3), EvalMetric("score"))}
    assert means["mean@3"].tolist() == pytest.approx([1 / 3, 0])
    assert means["score"].tolist() == [0.5, 0.5]  # what has no score counts in no mean score
    assert compute_metric(found, EvalMetric("length")).tolist() == [3, 3]
    assert compute_metric(found, EvalMetric("truncated")).tolist() == pytest.approx([1 / 3, 2 / 3])
    assert compute_metric(found, EvalMetric("accuracy")) is None  # nobody asked for greedy answers
    assert compute_metric(found, EvalMetric("pass", 4)) is None
    nothing = estimate_mean(compute_metric(samples([[math.nan]]), EvalMetric("score")))
    assert nothing.prompts == 0 and math.isnan(nothing.value)


def test_how_sure_a_metric_is():
    one = estimate_mean(np.array([1.0]))
    assert (one.value, one.prompts) == (1.0, 1) and math.isnan(one.standard_error)
    shares = estimate_mean(np.array([1.0] * 8 + [0.0] * 2))
    # Wilson's interval of 8 in 10.
    assert (shares.low, shares.high) == pytest.approx((0.490, 0.943), abs=1e-3)
    assert shares.standard_error == pytest.approx(math.sqrt(0.8 * 0.2 / 9))
    scores = estimate_mean(np.linspace(0, 1, 101) ** 2)
    assert scores.low < scores.value < scores.high
    assert scores.high - scores.low == pytest.approx(2 * 1.96 * scores.standard_error, rel=0.1)


def test_mcnemar_is_that_of_a_fair_coin():
    for gained, lost in itertools.product(range(7), repeat=2):
        total = gained + lost
        tail = sum(math.comb(total, i) for i in range(min(gained, lost) + 1)) / 2**total
        assert mcnemar_p_value(gained, lost) == pytest.approx(min(1, 2 * tail))


def test_the_same_prompts_tell_more_than_their_means():
    then = np.linspace(0, 1, 50)
    now = then + 0.02
    assert (
        compare_paired(now, then).p
        < 0.01
        < 0.5
        < compare_unpaired(estimate_mean(now), estimate_mean(then)).p
    )
    assert compare_paired(now, now)._replace(low=0, high=0)[:4] == (0, 0, 0, 1)
    right = np.array([1.0] * 30)
    assert compare_paired(right, np.array([0.0] * 30)).test == "McNemar"


def test_a_bootstrap_looks_on_both_sides():
    """All of 2000 draws, and the one that is assumed beside them, lie on one side; and of
    differences whose mean is as likely above zero as below."""
    now, then = np.arange(2.0, 22.0), np.arange(20.0)
    assert compare_paired(now, then).p == compare_paired(then, now).p == pytest.approx(2 / 2001)
    even = np.array([3.0, -3.0] * 8)
    assert 0.9 < compare_paired(even, np.zeros(16)).p <= 1


@pytest.mark.parametrize("prompts", [1, 2, 3, 5])
def test_few_prompts_show_no_more_than_a_fair_coin(prompts):
    """All of them changed the same way: as likely as so many heads or so many tails."""
    then = np.arange(float(prompts))
    found = compare_paired(then + 0.5, then)
    assert found.p == 2 / 2**prompts
    assert math.isnan(found.low) == math.isnan(found.high) == (prompts == 1)
    assert math.isnan(estimate_mean(np.array([0.5])).low)


def test_unlike_prompts_are_compared_by_a_normal_distribution():
    """Standard errors of 0.06 and 0.08 are 0.1 together: a difference of 0.196 is as large as 5 in
    100 would be by chance, one of 0.2576 as 1 in 100."""
    for difference, p in ((0.196, 0.05), (-0.196, 0.05), (0.2576, 0.01), (0.0, 1.0)):
        now = MetricEstimate(0.5 + difference, 0.06, math.nan, math.nan, 40)
        found = compare_unpaired(now, MetricEstimate(0.5, 0.08, math.nan, math.nan, 30))
        assert found.value == pytest.approx(difference, abs=1e-9)
        assert found.p == pytest.approx(p, abs=1e-4)
        assert found.high - found.low == pytest.approx(0.392, abs=1e-4)


def test_a_baseline_pairs_prompts_by_their_keys_in_any_order(tmp_path):
    then = samples([[1.0], [0.0], [0.0], [0.0]], greedy=True, keys=["a", "b", "c", "d"])
    pq.write_table(then.table, tmp_path / "then.parquet")
    known = {"value": 0.25, "standard_error": 0.2, "low": 0, "high": 1, "prompts": 4}
    sets = {"math": {"step": 7, "samples": "then.parquet", "metrics": {"accuracy": known}}}
    now = samples([[1.0], [1.0], [1.0], [1.0]], greedy=True, keys=["d", "c", "b", "a"])
    mean = estimate_metrics(now, [EvalMetric("accuracy")])["accuracy"]
    found = EvalBaseline(tmp_path, sets).difference("math", "accuracy", mean, now)
    assert (found["value"], found["baseline"], found["test"]) == (0.75, 0.25, "McNemar")
    same = samples([[0.0], [0.0], [0.0], [1.0]], greedy=True, keys=["d", "c", "b", "a"])
    found = EvalBaseline(tmp_path, sets).difference("math", "accuracy", mean, same)
    assert (found["low"], found["high"]) == (0, 0)  # no prompt has changed
    others = samples([[1.0]], greedy=True, keys=["e"])
    found = EvalBaseline(tmp_path, sets).difference("math", "accuracy", mean, others)
    assert (found["value"], found["test"]) == (0.75, "unpaired")
    (tmp_path / "then.parquet").unlink()
    found = EvalBaseline(tmp_path, sets).difference("math", "accuracy", mean, now)
    assert found["test"] == "unpaired"
    assert EvalBaseline(tmp_path, sets).difference("math", "score", mean, now) is None


def test_prompts_without_a_text_are_known_by_all_that_the_data_says():
    rows = {"prompt": ["1+1=", "1+1=", "", ""], "answer": ["2", "2", "", ""], "task": [1, 2, 3, 4]}
    keys = compute_prompt_keys(Batch.from_columns(rows))
    assert len(set(keys)) == 4
    assert keys[0].partition(".")[0] == keys[1].partition(".")[0]
    assert keys[2].partition(".")[0] != keys[3].partition(".")[0]


def test_answers_are_found_in_responses():
    text = "So 3+4=7, hence \\boxed{ 7 }. Answer: seven\nAnswer: eight "
    assert resolve_extractor("", None, ["boxed"])(text) == "7"
    assert resolve_extractor("", "number", [])("1,234.50 or 7.0") == "7"
    assert resolve_extractor("", None, ["exact"])("  a ") == "a"
    assert resolve_extractor("", r"Answer: (\w+)", [])(text) == "eight"
    for name in ("boxed", "number", "text", "(x)"):
        assert resolve_extractor("", name, [])("") is None


def reason(stop, step, **figures):
    """Why a run is to end after an evaluation; empty: it goes on."""
    try:
        stop.on_evaluation(FinishedEvaluation(step, figures))
    except EndRun as end:
        return str(end)
    return ""


def test_a_run_ends_when_nothing_has_become_better_for_long():
    summary = {}
    stop = EarlyStopWatcher(EvalStopConfig("accuracy", patience=2, least=0.05), summary)
    for step, value in enumerate([0.2, 0.4, 0.44]):
        assert not reason(stop, step, accuracy=value)
    resumed = EarlyStopWatcher(
        EvalStopConfig("accuracy", patience=2), json.loads(json.dumps(summary))
    )
    assert "accuracy was best at step 1 (0.4)" in reason(resumed, 3, accuracy=math.nan)
    with pytest.raises(EndRun, match="best at step 1"):  # of the checkpoint
        resumed.on_resume(3)
    with pytest.raises(ConfigError, match=r"eval.stop.metric=accuracy: no evaluation .* gives"):
        reason(resumed, 4, acuracy=1.0)
    of_others = FinishedEvaluation(4, {}, covers=lambda figure: False)
    assert resumed.on_evaluation(of_others) == ()


def test_a_run_ends_when_it_is_good_enough():
    stop = EarlyStopWatcher(EvalStopConfig("-eval/loss", target=0.5), {})
    assert not reason(stop, 0, **{"eval/loss": 0.6})
    said = reason(stop, 1, **{"eval/loss": 0.5})
    assert "eval/loss is 0.5, as good as eval.stop.target=0.5 asks, since step 1" in said
    other = EarlyStopWatcher(EvalStopConfig("accuracy", target=0.5), stop._summary)
    assert other.on_resume(1) == ()  # what is known is of another figure
    stop = EarlyStopWatcher(EvalStopConfig("accuracy", target=0.5, least=0.1), {})
    assert not reason(stop, 0, accuracy=0.45)
    # not better by `least`, and yet good enough
    assert "accuracy is 0.5" in reason(stop, 1, accuracy=0.5)


def test_the_file_holds_each_evaluation_once_and_forgets(tmp_path):
    file = EvaluationLog(tmp_path)
    assert file.read() == []
    entry = {"metrics": {"accuracy": {"value": math.nan}}}
    for step, name in ((4, "math"), (2, "math"), (4, "code"), (4, "math")):
        file.add({"step": step, "sets": {name: entry}})
    assert [(e["step"], sorted(e["sets"])) for e in file.read()] == [
        (2, ["math"]),
        (4, ["code", "math"]),
    ]
    assert file.read()[0]["sets"]["math"]["metrics"]["accuracy"]["value"] is None
    assert find_latest_by_set(load_named_evaluations("", str(tmp_path))[1])["math"]["step"] == 4
    assert "accuracy" in render_plain_table(
        build_evaluation_table(find_latest_by_set(file.read()), "all")
    )
    file.forget_after(3)
    assert [e["step"] for e in file.read()] == [2]
    assert [path.name for path in tmp_path.iterdir()] == ["evaluations.json"]
    with pytest.raises(ConfigError, match=r"eval.baseline=.*there is no file"):
        load_named_evaluations("eval.baseline", str(tmp_path / "absent"))


def test_what_a_set_leaves_out_is_the_jobs():
    config = configured(
        [
            *("data=jsonl", "data.path=a.jsonl", "data.prompt_column=question", "model.path=m"),
            *(SET, "eval.sets.math.samples=4", "reward.timeout_s=7", "rollout.top_p=0.9"),
            *("eval.sets.math.reward.function=boxed", "eval.sets.plain.temperature=0"),
        ]
    )
    math_set, plain = resolve_eval_sets(config).values()
    assert math_set.data.path == "math.jsonl" and math_set.data.prompt_column == "question"
    assert math_set.reward.function == "boxed" and math_set.reward.timeout_s == 7
    assert list(map(str, math_set.metrics)) == ["mean@4", "pass@4", "score", "length"]
    assert plain.data is None and not plain.is_verified
    assert list(map(str, plain.metrics)) == ["accuracy", "score", "length"]
    training = SamplingSettings(8, temperature=0.7, top_p=0.9, min_tokens=2)
    assert resolve_set_sampling(math_set, training) == training
    assert resolve_set_sampling(plain, training) == training.greedy()
    assert math_set.is_due(0, False) and math_set.is_due(20, False) and math_set.is_due(7, True)
    assert not math_set.is_due(7, False)


REFUSED = [
    ([SET, "eval.sets.math.metrics=[pass@8]"], "`pass@8`, which needs 8 samples.*samples=8"),
    ([SET, "eval.sets.math.metrics=[passs@1]"], "there are accuracy, .*Did you mean `pass@k`"),
    ([SET, "eval.sets.math.samples=2", "eval.sets.math.temperature=0"], "would be the same"),
    (["eval.sets.held_out.samples=2"], "may not be called so"),
    (["eval.sets.math.smples=2"], "no setting `eval.sets.math.smples`.*`samples`"),
    (["eval.sets.math.data.system_prompt=hi"], "not where they are"),
    ([SET, "eval.sets.math.data.task=arithmetic"], "Both .*task.* and .*path"),
    ([SET, "eval.sets.math.reward.options.boxed.x=1"], "functions of the set's own"),
    ([SET, "eval.sets.math.reward.function=boxd"], "`eval.sets.math.reward.function`.*`boxed`"),
    ([SET, "eval.sets.math.extract='(['"], "eval.sets.math.extract=.*does not compile"),
    (
        [SET, *(f"eval.sets.math.{at}=false" for at in ("at_start", "at_end")), "eval.every=0"],
        "would never be evaluated",
    ),
    (["algorithm=sft", SET], "nothing is scored"),
    (["algorithm=evaluate", "eval.held_out=false"], "nothing would be evaluated"),
    (["eval.baseline=absent"], "eval.baseline=absent: there is no file"),
    ([SET, "eval.sets.math.metrics=[]"], "nothing would be measured"),
    ([SET, "eval.sets.math.data.sources={}"], "no setting `eval.sets.math.data.sources`"),
    (["guard.tripwires=1"], "each needs 2 steps or more"),
    (["guard.tripwires=900"], "at least two of them"),
    (["guard.tripwires=5", "algorithm=sft"], "Leave it out"),
    (["eval.stop.metric=accuracy"], "Set eval.stop.patience"),
    (["eval.stop.metric=accuracy", "eval.stop.target=1", "eval.every=0"], "it would end nothing"),
    ([SET, "eval.stop.metric=eval/maths/score", "eval.stop.target=1"], "there is no set `maths`"),
    ([SET, "checkpoint.best=eval/math/pass@8"], "does not measure `pass@8`"),
]


@pytest.mark.parametrize(("overrides", "words"), REFUSED, ids=lambda case: str(case)[-40:])
def test_what_cannot_be_evaluated_is_refused(overrides, words):
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        for check in EVALUATION_CHECKS:
            check(configured(overrides))


def test_a_function_of_the_users_is_given_what_it_names(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def good(step, generate, *, extra=1):\n    return {'a': step + extra}\n"
        "def asks(model):\n    pass\n"
        "def wrong(step):\n    return {'a': 'b'}\n"
        "def fails(step):\n    return 1 / 0\n"
    )
    given = dict.fromkeys(own.FUNCTION_ARGUMENTS, None) | {"step": 3}
    own.check_evaluation_function("eval.sets.x.function", f"{file}:good")
    assert own.run_evaluation_function("eval.sets.x.function", f"{file}:good", given) == {"a": 4.0}
    for name, words in (("asks", "asks for `model`"), ("absent", "defines no `absent`")):
        with pytest.raises(ConfigError, match=words):
            own.check_evaluation_function("eval.sets.x.function", f"{file}:{name}")
    with pytest.raises(ConfigError, match="must return a dictionary of names and numbers"):
        own.run_evaluation_function("eval.sets.x.function", f"{file}:wrong", given)
    with pytest.raises(ConfigError, match=r"(?s)raised ZeroDivisionError.*return 1 / 0"):
        own.run_evaluation_function("eval.sets.x.function", f"{file}:fails", given)


def test_truncated_and_unscored_evaluations_are_doubted():
    def said(found, **how):
        return doubts(found, "`math`", "rollout.max_tokens=8", **{"unscored": True, **how})

    assert said(samples([[1.0, 0.0], [0.0, 0.0]])) == []  # half of them is not most
    (unscored,) = said(samples([[0.0, -1.0], [0.0, float("nan")]]))
    assert "none of 3 responses scored above 0" in unscored and "data.answer_format" in unscored
    assert said(samples([[0.0, 0.0]]), unscored=False) == []
    assert said(samples([[float("nan")] * 2])) == []
    found = samples([[1.0], [1.0], [0.0]], greedy=True)
    cut = found.table.set_column(7, "finish_reason", pa.array(["length", "length", "stop"]))
    (truncated,) = said(SampleTable(cut))
    assert "2 of 3 responses ended at rollout.max_tokens=8" in truncated
    named = samples([[0.0]]).table.append_column("answer", pa.array(["so it is #### 5"]))
    assert "held against the answer 'so it is #### 5'" in said(SampleTable(named))[0]
