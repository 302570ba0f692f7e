"""Environments of verifiers 0.4, in a virtual environment of their own, played unchanged."""

import json
import random
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
from scripted_endpoint import ScriptedEndpoint

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.environments.environment_pool import EnvironmentPool, EpisodeRequest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".environments-venv" / "bin" / "python"
GUESSES = ROOT / "examples" / "verifiers_environment.py"
GAMES = ROOT / "examples" / "textarena_game.py"

PLAYED_AGAIN = """
import json, random, sys, textarena
for game, seed, answers in json.load(sys.stdin):
    random.seed(seed)
    engine = textarena.make(env_id=game)
    engine.reset(num_players=1)
    for answer in answers:
        engine.step(answer)
    print((engine.state.rewards or {}).get(0, 0.0))
"""

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not PYTHON.exists(), reason="needs verifiers: make .environments-venv/.installed"
    ),
]


@pytest.fixture
def played():
    """Plays so many of the environment's own tasks; what came of them, their rows, the endpoint."""
    opened = []

    def play(script, count, folder=None, **options):
        endpoint = ScriptedEndpoint(script, folder)
        settings = {"python": str(PYTHON), "timeout_s": 120.0}
        pool = EnvironmentPool(EnvironmentConfig("verifiers", options, **settings))
        opened.extend([endpoint, pool])
        rows = pool.rows(count)
        plays = []
        for number, row in enumerate(rows):
            url = endpoint.url(session := f"s{number}")
            plays.append(EpisodeRequest(number, row, url, endpoint.token, session, False))
        pool.start(plays)
        found = {}
        while len(found) < count:
            found |= {one.key: one for one in pool.poll(5.0)}
        return [found[number] for number in range(count)], rows, endpoint

    yield play
    for one in opened:
        one.close()


def halving(messages):
    """The middle of what may still be."""
    least, most, guess = 0, 9, 0
    for message in messages:
        guess = int(message["content"]) if message["role"] == "assistant" else guess
        least = guess + 1 if message["content"] == "up" else least
        most = guess - 1 if message["content"] == "down" else most
    return str((least + most) // 2)


def own_score(row, guesses):
    """What the taskset in the example pays for these guesses."""
    secret = json.loads(row["task"])["secret"]
    is_found = str(secret) in guesses
    digits = 3 if is_found else sum(guess.isdecimal() for guess in guesses)
    return is_found + 0.1 * digits / 3


def test_scores_are_those_of_the_environment(played):
    """Of 200 recorded episodes with an erring model, what is reported is what the taskset's own
    rewards say of what was written."""
    draws = random.Random(3)

    def script(messages):
        known = [m for m in messages if m["content"] in ("up", "down") or m["content"].isdecimal()]
        return draws.choice("0123456789x") if draws.random() < 0.5 else halving(known)

    found, rows, endpoint = played(script, 200, id=str(GUESSES))
    answers = defaultdict(list)
    for session, said in endpoint.answers:
        answers[session].append(said)
    for number, (one, row) in enumerate(zip(found, rows, strict=True)):
        assert one.kind == "ok", one.failure
        assert one.reward == pytest.approx(own_score(row, answers[f"s{number}"]))
    assert 0.2 < sum(one.reward for one in found) / 200 < 1.0


def test_scores_are_those_of_the_games_own_engine(played):
    """Of 200 recorded games of TextArena, what its engine says of the same moves without us."""
    draws = random.Random(5)
    moves = ["[accept]", "[continue]", "[continue]", "hm"]
    taskset = {"game": "Secretary-v0"}
    found, rows, endpoint = played(
        lambda messages: draws.choice(moves), 200, id=str(GAMES), taskset=taskset
    )
    answers = defaultdict(list)
    for session, said in endpoint.answers:
        answers[session].append(said)
    games = [
        (*(json.loads(row["task"])["info"][key] for key in ("game", "seed")), answers[f"s{number}"])
        for number, row in enumerate(rows)
    ]
    again = subprocess.run(
        [PYTHON, "-c", PLAYED_AGAIN], input=json.dumps(games), capture_output=True, text=True
    )
    assert [one.reward for one in found] == [float(line) for line in again.stdout.split()]
    assert {one.reward for one in found} == {-1.0, 0.0, 1.0}


def test_agents_of_an_episode_have_sessions_of_their_own(played):
    env = {"id": "best-of-n", "n": 2}
    found, _, endpoint = played(lambda messages: "5", 4, id=str(GUESSES), env=env)
    assert [sorted(one.sessions) for one in found] == [[f"s{n}", f"s{n}.1"] for n in range(4)]
    assert {session for session, _ in endpoint.requests} >= {"s0", "s0.1"}
    assert all("pass_at_n" in one.metrics for one in found)


def test_tokens_go_to_the_endpoint_as_verifiers_trains(played, tmp_path):
    build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True).save_pretrained(tmp_path)

    def script(text):
        return "8" if "up" in text else "5"

    found, rows, endpoint = played(script, 8, str(tmp_path), id=str(GUESSES), client="tokens")
    secrets = [json.loads(row["task"])["secret"] for row in rows]
    rewards = [1.1 if secret in (5, 8) else 0.1 for secret in secrets]
    assert [one.reward for one in found] == pytest.approx(rewards)
    assert all("token_ids" in body for _, body in endpoint.requests)


def test_what_fails_is_told(played):
    found, *_ = played(lambda messages: 500, 1, id=str(GUESSES))
    assert found[0].kind == "error" and "500" in found[0].failure
