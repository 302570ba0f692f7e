"""A judge that grades by criteria or puts answers in order: what it is asked, and what becomes of
what it writes. The model is a function of the request's text."""

import math
import os
import re

import pytest
import torch

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import CacheConfig, JudgeConfig, RolloutConfig
from hybridrl.controller import WorkerContext
from hybridrl.system.content_cache import ContentCache
from hybridrl.workers import llm_judge as judging
from hybridrl.workers.llm_judge import JudgeSetup, LLMJudge
from hybridrl.workers.training_engines import ModelSource


class Characters:
    chat_template = None
    all_special_tokens = ()

    def get_added_vocab(self):
        return {}

    def encode(self, text, **_):
        return list(map(ord, text))

    def batch_decode(self, rows, **_):
        return ["".join(map(chr, row)) for row in rows]


@pytest.fixture
def make(monkeypatch):
    def make(write, cache=None, model="judge", **settings):
        asked = []

        class Engine:
            def generate(self, batch, sampling, seed):
                texts = ["".join(map(chr, row.tolist())) for row in batch["prompt_ids"].rows()]
                asked.extend(texts)
                written = [torch.tensor(list(map(ord, write(text)))) for text in texts]
                return Batch.from_columns({"response_ids": written})

        monkeypatch.setattr(judging, "build_inference_engine", lambda *_: Engine())
        monkeypatch.setattr(judging, "load_tokenizer", lambda _: Characters())
        monkeypatch.setattr(judging, "join_group_world", lambda _: None)
        source = ModelSource(model, model, "float32", 4096, (0,))
        config = JudgeConfig(path=model, **settings)
        setup = JudgeSetup(source, RolloutConfig(), "job")
        judge = LLMJudge(WorkerContext("reward", 0, 1), setup, config, cache=cache)
        return judge, asked

    return make


def rows(*responses, **columns):
    return [{"prompt": "Why?", "response": text, "answer": "42", **columns} for text in responses]


def by_length(text):
    """Ranks answers by their length, the longest first; equal ones tie."""
    answers = dict(re.findall(r"Answer (\d+):\n(\w*)", text))
    lengths = sorted({len(said) for said in answers.values()}, reverse=True)
    tied = [[n for n, said in answers.items() if len(said) == length] for length in lengths]
    return "Ranking: " + " > ".join(" = ".join(numbers) for numbers in tied)


def test_answers_to_a_prompt_are_put_in_order_in_one_request(make):
    judge, asked = make(by_length, mode="rank")
    grades = judge.grade(rows("a", "ccc", "bb", "d", "e", "ff"), [5, 5, 5, 6, 7, 7])
    assert grades.tolist() == [0.0, 1.0, 0.5, 0.5, 0.0, 1.0]
    assert len(asked) == 2 and "Why?" in asked[0] and "42" in asked[0]


def test_the_order_of_the_request_is_random_and_always_the_same(make):
    first = set()
    for number in range(20):
        judge, asked = make(by_length, mode="rank")
        said = rows(*(f"{letter}{number}" for letter in "abcd"))
        judge.grade(said, [0] * 4)
        judge.grade(said, [0] * 4)
        assert asked[0] == asked[1]
        first.add(re.search(r"Answer 1:\n(\w)", asked[0])[1])
    assert first == set("abcd")


def test_a_ranking_that_is_none_leaves_the_group_ungraded(make):
    judge, _ = make(
        lambda text: "Ranking: 1 > 1" if "bad" in text else by_length(text), mode="rank"
    )
    grades = judge.grade(rows("a", "bad", "c", "dd"), [0, 0, 1, 1]).tolist()
    assert all(map(math.isnan, grades[:2])) and grades[2:] == [0.0, 1.0]


def test_each_criterion_is_asked_for_by_itself(make):
    def met(text):
        return "Score: 10" if "Criterion:\nis short" in text else "Score: 5"

    rubric = [{"criterion": "is short", "weight": 3}, "is kind"]
    judge, asked = make(met, rubric_column="rubric")
    found = judge.grade([*rows("a", rubric=rubric), *rows("b", rubric=["is kind"])])
    assert found.tolist() == [3.5 / 4, 0.5] and len(asked) == 3
    assert "Answer:\na" in asked[0] and "Answer:\nb" in asked[2]


def test_a_criterion_without_a_grade_leaves_the_answer_ungraded(make, tmp_path):
    path = tmp_path / "rubric.json"
    path.write_text('["is short", "is kind"]')
    judge, _ = make(lambda text: "Score: 10" if "short" in text else "well", rubric=str(path))
    assert math.isnan(judge.grade(rows("a"))[0])


def test_no_rows_are_no_requests(make):
    for settings in ({}, {"mode": "rank"}, {"rubric_column": "rubric"}):
        judge, asked = make(by_length, **settings)
        assert len(judge.grade([])) == 0 and not asked


@pytest.mark.parametrize(
    ("kind", "engine", "built"),
    [
        ("cuda", "vllm", "process of its own"),
        ("cuda", "transformers", "here"),
        ("cpu", "vllm", "here"),
    ],
)
def test_on_a_gpu_the_vllm_of_a_judge_shares_no_process(kind, engine, built, monkeypatch):
    """An actor's engine may sleep in this one."""
    monkeypatch.setattr(judging, "load_tokenizer", lambda _: Characters())
    monkeypatch.setattr(judging, "join_group_world", lambda _: None)
    monkeypatch.setattr(judging, "build_inference_engine", lambda *_: "here")
    monkeypatch.setattr(judging, "EngineProcess", lambda *_: "process of its own")
    source = ModelSource("judge", "judge", "float32", 4096, (0,))
    setup = JudgeSetup(source, RolloutConfig(engine=engine), "job")
    context = WorkerContext("reward", 0, 1, device_kind=kind)
    assert LLMJudge(context, setup, JudgeConfig(path="judge"))._engine == built


@pytest.fixture
def model(tmp_path):
    (tmp_path / "judge").mkdir()
    (tmp_path / "judge" / "weights").write_bytes(b"123")
    return tmp_path / "judge"


def test_a_judge_with_a_cache_writes_each_answer_once(make, tmp_path, model):
    """Neither within a call nor in another run; and another model, request or option is asked."""

    def grade(*responses, write=lambda text: f"Score: {text.count('x')}", **settings):
        cache = ContentCache(CacheConfig(folder=str(tmp_path / "cache")), "judgements")
        judge, asked = make(write, cache=cache, model=str(model), **settings)
        return judge.grade(rows(*responses)).tolist(), len(asked), cache.take_counts()

    counts = {"cache_judgements_asked": 3, "cache_judgements_hits": 0}
    assert grade("x", "xx", "x") == (pytest.approx([0.1, 0.2, 0.1]), 2, counts)
    assert grade("xx", "xxx", "x")[:2] == (pytest.approx([0.2, 0.3, 0.1]), 1)
    assert grade("xx", max_tokens=100)[1] == 1
    assert grade("xx", scale=5)[:2] == (pytest.approx([0.4]), 0)
    assert grade()[:2] == ([], 0)
    status = (model / "weights").stat()
    (model / "weights").write_bytes(b"124")
    os.utime(model / "weights", ns=(status.st_atime_ns, status.st_mtime_ns))  # as if unchanged
    assert grade("xx", write=lambda _: "Score: 7")[:2] == (pytest.approx([0.7]), 1)
    assert grade("xx", "y", write=lambda _: "")[1] == 1  # what is no grade is an answer, too
    assert grade("y", write=lambda _: "Score: 7")[1] == 0


def test_a_judge_whose_files_change_while_they_are_read_has_no_cache(
    make, monkeypatch, tmp_path, model
):
    class Engine:
        def __init__(self):
            (model / "weights").write_bytes(b"125")

    cache = ContentCache(CacheConfig(folder=str(tmp_path / "cache")), "judgements")
    judge, _ = make(lambda _: "Score: 7", cache=cache, model=str(model))
    assert judge._cache is cache
    monkeypatch.setattr(judging, "build_inference_engine", lambda *_: Engine())
    source = ModelSource(str(model), str(model), "float32", 4096, (0,))
    setup = JudgeSetup(source, RolloutConfig(), "job")
    for path, kept in ((str(model), False), ("no/such-judge", False)):
        setup = setup._replace(source=ModelSource(path, path, "float32", 4096, (0,)))
        judge = LLMJudge(WorkerContext("reward", 0, 1), setup, JudgeConfig(path=path), cache=cache)
        assert (judge._cache is cache) == kept


def test_the_tokenizer_of_a_judge_counts(make, tmp_path, model):
    """It makes the text of the tokens that are written."""
    (tmp_path / "tokens").mkdir()
    source = ModelSource(str(model), str(tmp_path / "tokens"), "float32", 4096, (0,))
    first = judging._identify_model(source, [])
    (tmp_path / "tokens" / "vocab").write_text("1")
    assert judging._identify_model(source, []) != first
