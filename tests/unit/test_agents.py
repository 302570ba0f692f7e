"""AgentGenerator: what programs had sampled over HTTP is what is learned from."""

import contextlib
import itertools
import json
import math
import re
import threading
import time
from collections import Counter
from pathlib import Path

import httpx
import pytest
import torch
from agent_cases import (
    TEMPLATES,
    TRAINED,
    ScriptedEngine,
    ThreadPrograms,
    endpoint_of,
    merging_tokenizer,
)
from agent_programs import Conversation, turns_of

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import EnvironmentConfig, RolloutConfig
from hybridrl.environments.adapters.environment_adapter import MODEL_NAME
from hybridrl.environments.episode_request import EpisodeResult
from hybridrl.errors import RolloutError
from hybridrl.rollout.sample_generator import GenerationTask
from hybridrl.run_files.run_reader import open_run
from hybridrl.serving.agent_rollout import AgentGenerator, agent_generator
from hybridrl.serving.failed_episodes import FailedEpisodes
from hybridrl.serving.renderer_chat import choose_renderer
from hybridrl.serving.routes import ServedModel


def rows(count, copies=1):
    numbers = [number for number in range(count) for _ in range(copies)]
    return Batch.from_columns(
        {"prompt_ids": [torch.tensor([7, number]) for number in numbers], "number": numbers}
    )


def rollout_of(engine, play, failed=None, **settings):
    endpoint = endpoint_of(engine.tokenizer)
    programs = ThreadPrograms(play, endpoint.exchange.wake)
    return AgentGenerator(engine, endpoint, programs, EnvironmentConfig(**settings), failed=failed)


@pytest.fixture
def closing():
    rollouts = []
    yield rollouts.append
    for rollout in rollouts:
        rollout.close()


@pytest.fixture(scope="module")
def http():
    with httpx.Client(limits=httpx.Limits(max_connections=64)) as client:
        yield client


def ask(http, play, text="hi"):
    answer = http.post(
        f"{play.url}/chat/completions",
        json={"messages": [{"role": "user", "content": text}]},
        headers={"Authorization": f"Bearer {play.token}"},
        timeout=60,
    )
    return answer.json()["choices"][0]["message"]["content"]


def play_all_ways(template, episodes, http, closing):
    """Plays episodes with all quirks; the engine is a little slow, so that programs leave while it
    works for them."""
    engine = ScriptedEngine(merging_tokenizer(template))
    engine.poll_s = 0.001
    conversations = []

    def play(play):
        conversations.append(Conversation(play, http))
        return conversations[-1].run(4)

    rollout = rollout_of(engine, play)
    closing(rollout)
    batch = rollout.generate(rows(episodes), TRAINED, seed=3)
    assert batch["finish_reason"].count("error") == 0
    turns, sampled = sorted(turns_of(batch)), sorted(engine.sampled)
    answered, gone = int(batch["episode_rewards"].sum()), Counter(c.quirk for c in conversations)
    # What is answered just when its program goes away may be there, or not.
    assert answered <= len(turns) <= len(sampled) <= answered + gone["goes away"]
    assert turns == [one for one in sampled if one in turns]
    return batch, engine


@pytest.mark.more
@pytest.mark.parametrize("template", TEMPLATES)
def test_all_that_was_sampled_is_there_exactly_once(template, http, closing):
    batch, engine = play_all_ways(template, 24, http, closing)
    assert (batch["branches"] > 1).any() and (batch["branches"] == 1).any()
    assert not engine.running


@pytest.mark.long
@pytest.mark.parametrize("template", TEMPLATES)
def test_it_is_so_for_500_episodes(template, http, closing):
    play_all_ways(template, 500, http, closing)


def test_an_episode_is_repeatable(http, closing):
    def turns(seed):
        rollout = rollout_of(
            ScriptedEngine(merging_tokenizer("plain")),
            lambda play: Conversation(play, http, "plain").run(3),
        )
        closing(rollout)
        return turns_of(rollout.generate(rows(4), TRAINED, seed))

    first = turns(3)
    assert first == turns(3) != turns(4)


def test_samples_of_a_prompt_begin_together(http, closing):
    engine = ScriptedEngine(merging_tokenizer("plain"))
    rollout = rollout_of(engine, lambda play: float(len(ask(http, play))))
    closing(rollout)
    rollout.generate(rows(2, copies=3), TRAINED, 0)
    by_id = rows(4).with_columns({"group_id": torch.tensor([0, 0, 0, 1])})
    rollout.generate(by_id, TRAINED, 0)
    assert [len(group) for group in rollout.programs.groups] == [3, 3, 3, 1]


def test_no_row_and_rows_that_ask_nothing(closing):
    rollout = rollout_of(ScriptedEngine(merging_tokenizer("plain")), lambda play: 0.25)
    closing(rollout)
    assert len(rollout.generate(rows(0), TRAINED, 0)) == 0
    batch = rollout.generate(rows(2), TRAINED, 0)
    assert batch["branches"].tolist() == [0, 0] and batch["episode_rewards"].tolist() == [0.25] * 2
    assert [ids.tolist() for ids in batch["prompt_ids"].rows()] == [[7, 0], [7, 1]]


def fails(http):
    def play(play):
        ask(http, play)
        if play.row["number"] == 1:
            raise RuntimeError("the tool is broken")
        if play.row["number"] == 2:
            return EpisodeResult(play.key, math.nan, None, {}, "It hung.", "timeout")
        return EpisodeResult(play.key, 1.0, [1.0], {"steps": 4.0}, None, "ok")

    return play


def test_an_episode_that_fails_costs_itself(http, closing):
    rollout = rollout_of(ScriptedEngine(merging_tokenizer("plain")), fails(http))
    closing(rollout)
    batch = rollout.generate(rows(3), TRAINED, 0)
    rollout.generate(rows(3), TRAINED, 0)
    assert batch["finish_reason"][1:] == ["error", "timeout"]
    rewards = batch["episode_rewards"].tolist()
    assert rewards[0] == 1.0 and math.isnan(rewards[1]) and math.isnan(rewards[2])
    assert batch["turns"].tolist() == [1, 1, 1], "what was sampled is there"
    assert [row.tolist() for row in batch["turn_rewards"].rows()] == [[1.0], [], []]
    assert batch["environment/steps"].tolist()[0] == 4.0
    said = "\n".join(rollout.notices)
    assert said.count("the tool is broken") == 2, "once, with its line"


def test_failed_episodes_are_kept_with_row_traceback_and_transcript(
    http, closing, tmp_path, monkeypatch
):
    monkeypatch.setattr("hybridrl.serving.failed_episodes.MOST_KEPT", 2)
    tokenizer = merging_tokenizer("plain")
    failed = FailedEpisodes(tmp_path / "failed", 1, "games.py:play", tokenizer)
    rollout = rollout_of(ScriptedEngine(tokenizer), fails(http), failed)
    closing(rollout)
    for _ in range(3):
        rollout.generate(rows(3), TRAINED, 0)
    names = [f"1-{kind}-0{number}.json" for kind in ("error", "timeout") for number in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "failed").iterdir()) == names
    kept = json.loads((tmp_path / "failed" / names[0]).read_text())
    assert kept["kind"] == "error" and "the tool is broken" in kept["failure"]
    assert kept["row"]["number"] == 1 and kept["environment"] == "games.py:play"
    (conversation,) = kept["transcript"]
    assert [one["by"] for one in conversation[:2]] == ["program", "model"]
    assert all(one["text"] == tokenizer.decode(one["token_ids"]) for one in conversation)
    assert "hi" in conversation[0]["text"]
    assert names[0] in "\n".join(rollout.notices)
    again = FailedEpisodes(tmp_path / "failed", 1, "games.py:play", tokenizer)
    assert again.keep(None, EpisodeResult(0, 0.0, None, {}, "x", "error"), [], 0) is None, (
        "of a resumed run"
    )
    (tmp_path / "config.yaml").write_text("")
    found = open_run(tmp_path).failed_episodes()
    (line,) = [one for one in found if "(error)" in one["line"]]
    assert line["times"] == 2 and line["files"] == [f"failed/{name}" for name in names[:2]]


def test_a_program_that_ends_well_and_reports_nothing_scores_0_with_a_warning(http, closing):
    def play(play):
        ask(http, play)
        return EpisodeResult(play.key, math.nan, None, {}, None, "ok")

    rollout = rollout_of(ScriptedEngine(merging_tokenizer("plain")), play, name="command")
    closing(rollout)
    assert rollout.generate(rows(2), TRAINED, 0)["episode_rewards"].tolist() == [0.0, 0.0]
    assert not rollout.notices
    (said,) = rollout.remarks
    assert said.startswith("A program ended with exit status 0, but reported no reward")
    assert "environment.options.report" in said
    assert "scores 0" in said


def test_a_failure_can_have_a_value_or_end_the_job(http, closing):
    engine = ScriptedEngine(merging_tokenizer("plain"))
    rollout = rollout_of(engine, fails(http), on_error="value", error_value=-1.0)
    closing(rollout)
    assert rollout.generate(rows(3), TRAINED, 0)["episode_rewards"].tolist() == [1.0, -1.0, -1.0]
    strict = rollout_of(ScriptedEngine(engine.tokenizer), fails(http), on_error="fail")
    closing(strict)
    with pytest.raises(RolloutError, match="the tool is broken"):
        strict.generate(rows(2), TRAINED, 0)
    assert not strict.endpoint.sessions._open


def test_what_a_program_reports_goes_before_what_was_returned(http, closing):
    def play(play):
        ask(http, play)
        body = {"reward": 0.5, "turn_rewards": [0.1], "metrics": {"steps": 2}}
        headers = {"Authorization": f"Bearer {play.report_token}"}
        url = play.url.removesuffix("/v1")
        assert http.post(f"{url}/reward", json=body, headers=headers).status_code == 200
        return 9.0

    rollout = rollout_of(ScriptedEngine(merging_tokenizer("plain")), play)
    closing(rollout)
    batch = rollout.generate(rows(1), TRAINED, 0)
    assert batch["episode_rewards"].tolist() == [0.5]
    assert batch["turn_rewards"].rows()[0].tolist() == pytest.approx([0.1])
    assert batch["environment/steps"].tolist() == [2.0]


def test_conversations_that_were_given_up_do_not_count(http, closing):
    def play(play):
        ask(http, play, "first")
        again = play._replace(url=play.url.replace(play.session, f"{play.session}.again1"))
        ask(http, again, "second")
        sessions = {f"{play.session}.again1": 1.0}
        return EpisodeResult(play.key, 1.0, None, {}, None, "ok", sessions)

    engine = ScriptedEngine(merging_tokenizer("plain"), lambda prompt, seed: "in<|end|>")
    rollout = rollout_of(engine, play)
    closing(rollout)
    batch = rollout.generate(rows(1), TRAINED, 0)
    assert batch["branches"].tolist() == [1] and batch["turns"].tolist() == [1]
    assert "second" in engine.tokenizer.decode(batch["prompt_ids"].rows()[0])


def test_episodes_come_as_they_finish_with_the_version_of_each_token(http, closing):
    go_on = threading.Event()

    def play(play):
        if play.row["number"] == 0:
            assert go_on.wait(60)
        return float(len(ask(http, play)))

    engine = ScriptedEngine(merging_tokenizer("plain"), lambda prompt, seed: "hello<|end|>", pace=1)
    rollout = rollout_of(engine, play)
    closing(rollout)
    versions = itertools.count(11)
    playing = rollout.begin(GenerationTask(rows(2), TRAINED, [5, 6], version=10))
    first, numbers = playing.next_samples(1)
    assert numbers.tolist() == [1] and set(first["token_versions"].values.tolist()) == {10}
    go_on.set()
    second, numbers = playing.next_samples(9, lambda: next(versions))
    found = second["token_versions"].values.tolist()
    assert numbers.tolist() == [0] and found == list(range(found[0], found[0] + 6))
    assert len(playing.next_samples(1)[0]) == 0
    playing.close()


def test_a_request_that_the_engine_refuses_ends_no_job(http, closing):
    def refuse(prompt, seed):
        raise ValueError("too hot")

    def play(play):
        body = {"messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": f"Bearer {play.token}"}
        answer = http.post(f"{play.url}/chat/completions", json=body, headers=headers, timeout=60)
        assert answer.status_code == 409 and "too hot" in answer.text
        return 1.0

    rollout = rollout_of(ScriptedEngine(merging_tokenizer("plain"), refuse), play)
    closing(rollout)
    batch = rollout.generate(rows(1), TRAINED, 0)
    assert batch["episode_rewards"].tolist() == [1.0] and batch["turns"].tolist() == [0]


def test_nobody_works_while_nobody_asks(http, closing):
    """The thread that generates sleeps until a request comes."""

    def play(play):
        time.sleep(0.5)
        ask(http, play)
        time.sleep(0.5)
        return 1.0

    rollout = rollout_of(ScriptedEngine(merging_tokenizer("plain")), play)
    closing(rollout)
    before = time.thread_time()
    rollout.generate(rows(1), TRAINED, 0)
    assert time.thread_time() - before < 0.3


def outside_rollout(tmp_path, closing, timeout_s=60.0):
    tokenizer = merging_tokenizer("plain")
    rollout = agent_generator(
        ScriptedEngine(merging_tokenizer("plain")),
        ServedModel(MODEL_NAME, tokenizer, choose_renderer(tokenizer, "m"), 200, 4096),
        RolloutConfig(serve=True),
        EnvironmentConfig(timeout_s=timeout_s),
        folder=tmp_path,
    )
    closing(rollout)
    return rollout


def test_programs_from_outside_ask_for_rows(tmp_path, http, closing):
    rollout = outside_rollout(tmp_path, closing)
    headers = {"Authorization": f"Bearer {rollout.endpoint.token}"}
    refused = []

    def program():
        while True:
            try:
                answer = http.get(
                    f"{rollout.endpoint.url}/episodes/next", headers=headers, timeout=60
                )
            except httpx.HTTPError:
                return  # the job is over
            if answer.status_code == 410:
                return
            given = answer.json()
            body = {"messages": [{"role": "user", "content": "hi"}]}
            samples = {"Authorization": f"Bearer {given['token']}"}
            reports = {"Authorization": f"Bearer {given['report_token']}"}
            http.post(f"{given['url']}/chat/completions", json=body, headers=samples, timeout=60)
            session = given["url"].removesuffix("/v1")
            body = {"reward": given["row"]["number"]}
            assert http.post(f"{session}/reward", json=body, headers=reports).status_code == 200
            again = {"reward": 99.0}  # the first has ended the episode
            refused.append(http.post(f"{session}/reward", json=again, headers=reports).status_code)

    threads = [threading.Thread(target=program, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for seed in (1, 2):
        batch = rollout.generate(rows(7), TRAINED, seed)
        assert batch["episode_rewards"].tolist() == list(range(7))
        assert batch["turns"].tolist() == [1] * 7
    assert refused and set(refused) == {404}


def test_the_program_of_the_endpoints_page_plays(tmp_path, closing):
    page = (Path(__file__).parents[2] / "docs" / "endpoint.md").read_text()
    (program,) = re.findall("```python\n(.*?)```", page, re.DOTALL)
    program = program.replace("runs/latest/endpoint-0.json", str(tmp_path / "endpoint-0.json"))
    rollout = outside_rollout(tmp_path, closing)
    rollout.engine.script = lambda prompt_ids, seed: "2<|end|>"

    def run():
        with contextlib.suppress(httpx.HTTPError):  # the job is over
            exec(program, {})

    threading.Thread(target=run, daemon=True).start()
    texts = {"prompt": ["1+1?"] * 3, "answer": ["2"] * 3}
    batch = rollout.generate(rows(3).with_columns(texts), TRAINED, 0)
    assert batch["finish_reason"] == ["stop"] * 3 and batch["turns"].tolist() == [1] * 3
    assert batch["episode_rewards"].tolist() == [1.0] * 3


def test_a_program_that_waits_for_a_row_is_told_that_the_job_has_ended(tmp_path, http):
    rollout = outside_rollout(tmp_path, lambda rollout: None)
    url, headers = rollout.endpoint.url, {"Authorization": f"Bearer {rollout.endpoint.token}"}
    answers = []

    def program():
        answers.append(http.get(f"{url}/episodes/next", headers=headers, timeout=60))

    waiting = threading.Thread(target=program, daemon=True)
    waiting.start()
    while not rollout.programs._asking:
        time.sleep(0.01)
    rollout.close()
    waiting.join(60)
    assert [answer.status_code for answer in answers] == [410]
    assert "The job has ended" in answers[0].json()["error"]["message"]


def test_a_row_that_is_not_played_is_given_up(tmp_path, http, closing):
    rollout = outside_rollout(tmp_path, closing, timeout_s=0.5)
    url, headers = rollout.endpoint.url, {"Authorization": f"Bearer {rollout.endpoint.token}"}

    def program():  # takes a row, and is not seen again
        http.get(f"{url}/episodes/next", headers=headers, timeout=60)

    threading.Thread(target=program, daemon=True).start()
    batch = rollout.generate(rows(1), TRAINED, 0)
    assert batch["finish_reason"] == ["timeout"] and batch["episode_rewards"].isnan().all()
