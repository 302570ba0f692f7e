"""Samples of several turns: what engines are asked, what comes back, what tools may do wrong."""

import asyncio
import contextlib
import logging
import threading
import time

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from hybridrl import Turn
from hybridrl.batch.batch import Batch
from hybridrl.checks.check_list import check
from hybridrl.config.schema import RolloutConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.datasets import load_rows
from hybridrl.data.tasks import calculator
from hybridrl.errors import ConfigError, RolloutError
from hybridrl.job.config_resolution import load_config
from hybridrl.rollout.episode_generator import EpisodeGenerator, load_episode_class
from hybridrl.rollout.rollout_engine import (
    BatchedEngine,
    EngineOutput,
    SamplingSettings,
    build_response_batch,
)
from hybridrl.rollout.transcript import TokenTranscript

TOKENIZER = build_character_tokenizer()
EOS = TOKENIZER.eos_token_id
PATIENCE_S, TIMEOUT_S = 60.0, 2.0
"""For tools that answer, and for those that hang."""


def ids(text):
    return TOKENIZER(text)["input_ids"]


def joined(turns):
    return [token for turn in turns for token in turn]


class ScriptedEngine(BatchedEngine):
    """Writes what `write(row, turn)` says, cut at the limit; one turn for each poll."""

    continuous = True

    def __init__(self, write):
        super().__init__()
        self.write = write
        self.requests = []
        self.turns = {}
        self.loaded = self.closed = False

    def start(self, request):
        super().start(request)
        self.requests.append(request)

    def poll(self):
        if not self._waiting:
            return []
        request = self._waiting.pop(0)
        turn = self.turns[request.key] = self.turns.get(request.key, -1) + 1
        tokens = [*ids(self.write(request.key, turn)), EOS]
        limit = request.sampling.max_tokens
        reason = "length" if len(tokens) > limit else "stop"
        tokens = tokens[:limit]
        log_probs = [-0.5] * len(tokens)
        return [EngineOutput(request.key, request.prompt_ids, tokens, log_probs, reason)]

    def generate(self, batch, sampling, seed):
        raise NotImplementedError

    def load(self, weights):
        self.loaded = True

    def close(self):
        self.closed = True


class Echo:
    """Says what it was told, with a `;`, until it is told `end`."""

    async def reset(self, row):
        self.row = row

    async def step(self, response_text, response_ids):
        if response_text == "end":
            return Turn("never seen", reward=2.0, done=True)
        return Turn(f"{response_text};", reward=0.25)


@pytest.fixture
def play():
    """Plays episodes of prompts `1=`, `2=`, ...; closes what it built."""
    built = []

    def run(episode, write, rows=1, engine=None, seed=7, max_turns=4, max_turn_tokens=None, **kind):
        engine = engine or ScriptedEngine(write)
        rollout = EpisodeGenerator(
            engine,
            episode,
            kind.pop("tokenizer", TOKENIZER),
            RolloutConfig(
                max_turns=max_turns,
                max_turn_tokens=max_turn_tokens,
                tool_timeout_s=kind.pop("tool_timeout_s", PATIENCE_S),
            ),
        )
        built.append(rollout)
        prompts = [f"{row + 1}=" for row in range(rows)]
        batch = Batch.from_columns({"prompt_ids": [ids(p) for p in prompts], "prompt": prompts})
        sampling = SamplingSettings(**{"max_tokens": 40, **kind})
        return rollout.generate(batch, sampling, seed), engine

    yield run
    for rollout in built:
        rollout.close()


def test_turns_alternate_and_the_mask_tells_them_apart(play):
    samples, engine = play(Echo, lambda row, turn: ["hi", "you", "end"][turn])
    turns = [[*ids("hi"), EOS], ids("hi;"), [*ids("you"), EOS], ids("you;"), [*ids("end"), EOS]]
    assert samples["response_ids"].rows()[0].tolist() == joined(turns)
    mask = [1] * 3 + [0] * 3 + [1] * 4 + [0] * 4 + [1] * 4
    assert samples["response_mask"].values.tolist() == mask
    assert samples["rollout_log_probs"].values.tolist() == [-0.5 * sampled for sampled in mask]
    assert samples["finish_reason"] == ["stop"]
    assert [r.prompt_ids for r in engine.requests] == [
        ids("1="),
        ids("1=") + joined(turns[:2]),
        ids("1=") + joined(turns[:4]),
    ]


def test_rewards_are_kept_by_turn_and_added_up(play):
    samples, _ = play(Echo, lambda row, turn: "end" if turn > row else "a", rows=2)
    assert samples["turns"].tolist() == [2, 3]
    assert [r.tolist() for r in samples["turn_rewards"].rows()] == [[0.25, 2], [0.25, 0.25, 2]]
    assert samples["episode_rewards"].tolist() == [2.25, 2.5]
    assert samples["episode_rewards"].dtype == samples["turn_rewards"].values.dtype == torch.float32


def merging_tokenizer():
    """Knows `a`, `b` and `ab`, which it always writes as one token."""
    vocabulary = {"<eos>": 0, "a": 1, "b": 2, "ab": 3, ";": 4}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


class Merging(ScriptedEngine):
    """Samples the tokens `a` and `b` one by one, which no tokenizer would make of `ab`."""

    naive = None

    def poll(self):
        prompt = self._waiting[0].prompt_ids
        (finished,) = super().poll()
        if self.naive is not None and self.turns[0]:  # as engines do that take texts
            prompt = self.naive(self.naive.decode(prompt))["input_ids"]
        return [finished._replace(prompt_ids=prompt, token_ids=[1, 2], log_probs=[-0.5, -0.5])]


class Three:
    def __init__(self):
        self.turns = 0

    async def reset(self, row):
        return None

    async def step(self, response_text, response_ids):
        assert (response_text, response_ids) == ("ab", [1, 2])
        self.turns += 1
        return Turn("ab;", done=self.turns == 3)


def test_earlier_turns_are_never_tokenized_again(play):
    tokenizer = merging_tokenizer()
    engine = Merging(lambda row, turn: "")
    samples, _ = play(Three, None, engine=engine, tokenizer=tokenizer)
    found = samples["response_ids"].rows()[0].tolist()
    assert found == [1, 2, 3, 4, 1, 2, 3, 4, 1, 2]
    assert tokenizer(tokenizer.decode(found))["input_ids"] == [3, 3, 4, 3, 3, 4, 3]
    before = []
    for request in engine.requests:
        assert request.prompt_ids[: len(before)] == before
        before = [*request.prompt_ids, 1, 2]


def test_an_engine_that_tokenizes_again_is_refused(play):
    engine = Merging(lambda row, turn: "")
    engine.naive = merging_tokenizer()
    with pytest.raises(RolloutError, match=r"differ from token 1 on.*never as text"):
        play(Three, None, engine=engine, tokenizer=engine.naive)


def test_a_transcript_accepts_only_its_own_tokens():
    transcript = TokenTranscript([5, 6])
    transcript.add_sampled(EngineOutput(0, [5, 6], [7, 8], [-1.0, -2.0], "stop"))
    transcript.add_given([9])
    for wrong in ([5, 6, 7, 8], [5, 6, 78, 9], [5, 6, 7, 8, 9, 9]):
        with pytest.raises(RolloutError, match=r"differ from token [245] on"):
            transcript.add_sampled(EngineOutput(0, wrong, [1], [-1.0], "stop"))
    transcript.add_sampled(EngineOutput(0, [5, 6, 7, 8, 9], [1], [-1.0], "stop"))
    assert transcript.response_ids == [7, 8, 9, 1] and transcript.mask == [1, 1, 0, 1]


def test_the_response_as_a_whole_has_a_limit(play):
    samples, engine = play(Echo, lambda row, turn: "abcd", max_tokens=14)
    # 5 sampled, 5 given, and room for 4 of the next 5.
    assert samples.lengths("response_ids").tolist() == [14]
    assert samples["finish_reason"] == ["length"] and samples["turns"].tolist() == [2]
    assert samples["turn_rewards"].values.tolist() == [0.25, 0.0]
    assert [request.sampling.max_tokens for request in engine.requests] == [14, 4]


def test_a_first_turn_at_the_limit_asks_no_tool(play):
    samples, _ = play(Echo, lambda row, turn: "abcd", max_tokens=4)
    assert samples["finish_reason"] == ["length"] and samples["turns"].tolist() == [1]
    assert samples["response_mask"].values.tolist() == [1] * 4
    assert samples["episode_rewards"].tolist() == [0.0]


@pytest.mark.parametrize("max_tokens", [9, 10])
def test_what_leaves_no_room_for_an_answer_is_not_given(play, max_tokens):
    samples, _ = play(Echo, lambda row, turn: "abcd", max_tokens=max_tokens)
    assert samples["response_mask"].values.tolist() == [1] * 5
    assert samples["finish_reason"] == ["length"]
    assert samples["episode_rewards"].tolist() == [0.25]


def test_turns_have_a_number_and_a_length(play):
    samples, _ = play(Echo, lambda row, turn: "a", max_turns=3)
    assert samples["finish_reason"] == ["max_turns"] and samples["turns"].tolist() == [3]
    assert samples["turn_rewards"].values.tolist() == [0.25] * 3
    assert samples["response_mask"].values[-1] == 1
    samples, engine = play(Echo, lambda row, turn: "a" * (turn + 1), max_turn_tokens=3)
    assert [request.sampling.max_tokens for request in engine.requests] == [3, 3, 3]
    assert samples["finish_reason"] == ["length"] and samples["turns"].tolist() == [3]


def test_the_shortest_response_counts_sampled_tokens(play):
    _, engine = play(Echo, lambda row, turn: "ab", min_tokens=8, max_turn_tokens=4)
    assert [request.sampling.min_tokens for request in engine.requests] == [4, 4, 2, 0]


def test_each_turn_has_a_seed_of_its_own(play):
    def seeds(seed):
        _, engine = play(Echo, lambda row, turn: "a", rows=3, seed=seed)
        return {(r.key, len(r.prompt_ids)): r.seed for r in engine.requests}

    assert seeds(1) == seeds(1)
    assert len(set(seeds(1).values())) == 12
    # The rows of a batch have the seeds that follow its first, so other batches begin far away.
    assert not set(seeds(1).values()) & set(seeds(100).values())


def test_an_episode_sees_its_row_and_may_speak_first(play):
    class First(Echo):
        async def reset(self, row):
            assert row == {"prompt": "2="} or row == {"prompt": "1="}
            return Turn(token_ids=ids("go")) if row["prompt"] == "2=" else Turn("say")

    samples, engine = play(First, lambda row, turn: "end", rows=2)
    prompts = {request.key: request.prompt_ids for request in engine.requests}
    assert prompts == {0: ids("1=say"), 1: ids("2=go")}
    assert [m.tolist() for m in samples["response_mask"].rows()] == [
        [0] * 3 + [1] * 4,
        [0] * 2 + [1] * 4,
    ]


def test_the_engine_goes_on_while_a_tool_runs(play):
    others_done = threading.Event()

    class Slow(Echo):
        """The tool of row 0 answers only when the other rows have had all their turns."""

        async def step(self, response_text, response_ids):
            if self.row["prompt"] == "1=":
                while not others_done.is_set():
                    await asyncio.sleep(0.001)
            return await super().step(response_text, response_ids)

    def write(row, turn):
        if row == 2 and turn == 3:
            others_done.set()
        return "end" if turn == 3 else "a"

    samples, _ = play(Slow, write, rows=3)
    assert samples["finish_reason"] == ["stop"] * 3 and samples["turns"].tolist() == [4] * 3


class Batches(ScriptedEngine):
    """Generates whole batches only."""

    continuous = False
    poll = BatchedEngine.poll

    def generate(self, batch, sampling, seed):
        self.batches = [*getattr(self, "batches", []), (len(batch), sampling.max_tokens, seed)]
        rows = [row.tolist() for row in batch["prompt_ids"].rows()]
        turns = [1 + row.count(EOS) for row in rows]
        texts = [[*ids("end" if turn == 3 else "ab"), EOS][: sampling.max_tokens] for turn in turns]
        return build_response_batch(
            [EngineOutput(0, [], text, [-0.5] * len(text), "stop") for text in texts]
        )


def test_an_engine_of_batches_takes_the_turns_together(play):
    class Varied(Echo):
        async def step(self, response_text, response_ids):
            await asyncio.sleep(0.01 * int(self.row["prompt"][0]))
            return await super().step(response_text, response_ids)

    samples, engine = play(Varied, None, rows=3, engine=Batches(None), max_tokens=20)
    assert [rows for rows, *_ in engine.batches] == [3, 3, 3]
    assert samples["finish_reason"] == ["stop"] * 3 and samples["turns"].tolist() == [3] * 3
    again, other = play(Varied, None, rows=3, engine=Batches(None), max_tokens=20)
    assert again.table == samples.table and other.batches == engine.batches


def test_a_batch_is_cut_at_the_limit_of_each_request(play):
    class Long(Echo):
        async def reset(self, row):
            return Turn("abcdefg"[: int(row["prompt"][0])])

    samples, engine = play(Long, None, rows=2, engine=Batches(None), max_tokens=4)
    assert engine.batches[0][:2] == (2, 3)
    assert samples.lengths("response_ids").tolist() == [4, 4]
    assert samples["finish_reason"] == ["length", "length"]
    assert samples["response_mask"].values.tolist() == [0, 1, 1, 1, 0, 0, 1, 1]


async def _waits():
    await asyncio.sleep(1000)


async def _blocks():
    time.sleep(1000)


async def _blocks_a_thread():
    await asyncio.to_thread(time.sleep, 1000)


async def _will_not_be_cancelled():
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(1000)


@pytest.mark.parametrize("hang", [_waits, _blocks, _blocks_a_thread, _will_not_be_cancelled])
def test_a_tool_that_hangs_ends_its_own_episode(play, hang, caplog):
    class Hangs(Echo):
        async def step(self, response_text, response_ids):
            if self.row["prompt"] == "2=" and response_text == "a":
                await hang()
            return await super().step(response_text, response_ids)

    # Row 1 hangs in its second turn, when the others have ended: what blocks the loop takes the
    # calls under way with it.
    def write(row, turn):
        return "a" if row == 1 and turn == 1 else "bc" if turn == 0 and row == 1 else "end"

    samples, _ = play(Hangs, write, rows=3, tool_timeout_s=TIMEOUT_S)
    assert samples["finish_reason"] == ["stop", "tool_timeout", "stop"]
    assert samples["turns"].tolist() == [1, 2, 1]
    assert samples["turn_rewards"].rows()[1].tolist() == [0.25, 0.0]
    assert ("blocks the asyncio loop" in caplog.text) is (hang is _blocks)
    assert hang is not _blocks or "time.sleep(1000)" in caplog.text


def test_a_blocked_loop_is_replaced(play):
    class Blocks(Echo):
        async def step(self, response_text, response_ids):
            if response_text == "a":
                time.sleep(1000)
            return await super().step(response_text, response_ids)

    engine = ScriptedEngine(lambda row, turn: "a")
    limits = RolloutConfig(max_turns=4, tool_timeout_s=TIMEOUT_S)
    rollout = EpisodeGenerator(engine, Blocks, TOKENIZER, limits)
    batch = Batch.from_columns({"prompt_ids": [ids("1=")]})
    first = rollout.generate(batch, SamplingSettings(20), 0)
    engine.write = lambda row, turn: "end"
    second = rollout.generate(batch, SamplingSettings(20), 0)
    rollout.close()
    assert first["finish_reason"] == ["tool_timeout"] and second["finish_reason"] == ["stop"]


class Broken(Echo):
    async def step(self, response_text, response_ids):
        if self.row["prompt"] == "1=":
            return await super().step(response_text, response_ids)
        raise ValueError("no such tool")


def test_a_tool_that_raises_ends_its_own_episode_and_is_logged_once(play, caplog):
    samples, _ = play(Broken, lambda row, turn: "end", rows=4)
    assert samples["finish_reason"] == ["stop"] + ["tool_error"] * 3
    assert samples["episode_rewards"].tolist() == [2.0, 0.0, 0.0, 0.0]
    (record,) = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert "no such tool" in record.getMessage() and "Traceback" in record.getMessage()


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda: None, "`step` of `rollout.episode` returned a NoneType"),
        (lambda: {"text": "a"}, "returned a dict"),
        (lambda: Turn("a", token_ids=[1]), "not both"),
        (lambda: Turn(reward=float("nan")), "finite"),
        (lambda: exit(3), "SystemExit"),
    ],
)
def test_wrong_answers_of_a_tool_are_errors(play, caplog, answer, words):
    class Wrong(Echo):
        async def step(self, response_text, response_ids):
            return answer()

    samples, _ = play(Wrong, lambda row, turn: "a")
    assert samples["finish_reason"] == ["tool_error"]
    assert words in caplog.text


def test_what_fails_to_begin_has_no_turn(play):
    class Never(Echo):
        def __init__(self):
            raise OSError("no sandbox")

    samples, engine = play(Never, lambda row, turn: "end", rows=2)
    assert samples["finish_reason"] == ["tool_error"] * 2 and not engine.requests
    assert samples["turns"].tolist() == [0, 0]
    assert samples.lengths("response_ids").tolist() == [0, 0]


def test_episodes_are_closed_however_they_end(play):
    closed = []

    class Closes(Broken):
        async def close(self):
            closed.append(self.row["prompt"])

    play(Closes, lambda row, turn: "end", rows=2)
    assert sorted(closed) == ["1=", "2="]
    closed.clear()
    play(Closes, lambda row, turn: "abcdef", max_tokens=3)
    assert closed == ["1="]


def test_it_ends_with_its_engine():
    engine = ScriptedEngine(None)
    limits = RolloutConfig(max_turns=1, tool_timeout_s=1.0)
    rollout = EpisodeGenerator(engine, Echo, TOKENIZER, limits)
    rollout.close()
    assert engine.closed


def test_a_failing_engine_leaves_no_request_behind(play):
    class Fails(ScriptedEngine):
        def poll(self):
            raise RuntimeError("out of memory")

    engine = Fails(None)
    with pytest.raises(RuntimeError, match="out of memory"):
        play(Echo, None, engine=engine, rows=2)
    assert engine._waiting == []


SETTINGS = ["executor=inline", "rollout=transformers"]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["rollout.episode=absent.py:Tool"], "`rollout.episode` names `absent.py:Tool`.*no file"),
        (["rollout.episode=Tool"], "`rollout.episode` is `Tool`; write `path/to/file.py:Name`"),
        (["rollout.max_turns=0"], "rollout.max_turns=0: must be 1 or more"),
        (["rollout.tool_timeout_s=0"], r"rollout.tool_timeout_s=0.0: must be more than 0"),
        (["rollout.max_turn_tokens=0"], "rollout.max_turn_tokens=0: must be 1 or more, or null"),
        (["reward.function=[]", "rollout.episode=null"], "`reward.function` is empty"),
    ],
)
def test_wrong_settings_are_sentences(overrides, words):
    with pytest.raises(ConfigError, match=words):
        check(load_config(["data=calculator", *SETTINGS, *overrides]))


def test_a_class_is_found_by_its_name(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "from hybridrl import Turn\n"
        "class Tool:\n"
        "    async def reset(self, row): ...\n"
        "    async def step(self, response_text, response_ids): return Turn(done=True)\n"
        "class Half:\n"
        "    async def reset(self, row): ...\n"
        "    def step(self, response_text, response_ids): ...\n"
        "number = 1\n"
    )
    check(load_config(["data=calculator", *SETTINGS, f"rollout.episode={path}:Tool"]))
    assert load_episode_class(f"{path}:Tool").__name__ == "Tool"
    with pytest.raises(ConfigError, match="no `async def step`"):
        load_episode_class(f"{path}:Half")
    with pytest.raises(ConfigError, match="is a int; it must be a class"):
        load_episode_class(f"{path}:number")
    with pytest.raises(ConfigError, match=r"defines no `Tol`.*Did you mean `Tool`"):
        check(load_config(["data=calculator", *SETTINGS, f"rollout.episode={path}:Tol"]))


def test_the_calculator_task():
    training, held_out = calculator.problems(count_held_out=256, seed=3)
    everything = {row["prompt"]: row["answer"] for row in training + held_out}
    numbers = range(32, 100)
    assert everything == {f"{a}*{b}=": str(a * b) for a in numbers for b in numbers}
    config = load_config(["data=calculator"]).data
    tokenizer = build_character_tokenizer(calculator.CHARACTERS)
    loaded = load_rows("prompts", config, tokenizer, held_out=256, seed=3)
    examples = loaded.examples
    assert len(examples) == len(training)
    with_tool = 0
    for problem, tokens, mask in zip(
        training, examples["response_ids"].rows(), examples["response_mask"].rows(), strict=True
    ):
        prompt, answer = problem["prompt"], problem["answer"]
        text = tokenizer.decode(tokens)
        if text.startswith("<"):
            with_tool += 1
            assert text == f"<{prompt[:-1]}>{answer}={answer}<eos>"
            assert mask.tolist() == [1] * 7 + [0] * 5 + [1] * 5
        else:
            assert text == f"{answer}<eos>" and mask.tolist() == [1] * 5
    assert abs(with_tool / len(training) - calculator.TOOL_SHARE) < 0.02


def test_the_calculator_answers_calls_and_judges_answers():
    async def steps(*texts):
        episode = calculator.Calculator()
        await episode.reset({"answer": "4042"})
        return [await episode.step(text, []) for text in texts]

    call, right, wrong, malformed = asyncio.run(steps("<47*86>", "4042", "4043", "<47*>"))
    assert call == Turn("4042=")
    assert right == Turn(reward=1.0, done=True)
    assert wrong == malformed == Turn(reward=0.0, done=True)
