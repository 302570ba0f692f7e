"""Adapters: what the model is told, what its answers do, and what that is worth."""

import asyncio
import contextlib
import json
import math
import random
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest
from aiohttp import WSMsgType, web
from scripted_endpoint import ScriptedEndpoint

from hybridrl.config.schema import EnvironmentConfig
from hybridrl.data.environment_tasks import list_environment_tasks
from hybridrl.environments.adapters.environment_adapter import (
    EpisodeError,
    EpisodeScore,
    parse_episode_score,
)
from hybridrl.environments.environment_pool import EnvironmentPool, EpisodeRequest
from hybridrl.environments.environment_program import with_direct_access
from hybridrl.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def play():
    """Plays rows with a model that follows a script; gives what came of them, in their order, and
    the endpoint."""
    with contextlib.ExitStack() as opened:

        def play(script, rows, name, **options):
            endpoint = ScriptedEndpoint(script)
            opened.callback(endpoint.close)
            pool = EnvironmentPool(EnvironmentConfig(name=name, options=options, timeout_s=60))
            opened.callback(pool.close)
            plays = []
            for number, row in enumerate(rows):
                url = endpoint.url(session := f"s{number}")
                plays.append(EpisodeRequest(number, row, url, endpoint.token, session, False))
            pool.start(plays)
            found = {}
            while len(found) < len(rows):
                found |= {played.key: played for played in pool.poll(5.0)}
            return [found[number] for number in range(len(rows))], endpoint

        yield play


def turn_of(messages):
    return sum(message["role"] == "assistant" for message in messages)


def test_gymnasium_is_played_in_words(play):
    way = ["down", "I go: Down", "right", "fly", "down", "right", "right"]
    options = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}, "invalid_reward": -0.5}
    options["actions"] = ["left", "down", "right", "up"]
    (played,), endpoint = play(
        lambda messages: way[turn_of(messages)], [{"seed": 3}], "gymnasium", **options
    )
    assert played.turn_rewards == [0, 0, 0, -0.5, 0, 0, 1] and played.reward == 0.5
    assert played.metrics == {"return": 1.0, "turns": 7.0, "invalid": 1.0}
    asked = [body["messages"][-1]["content"] for _, body in endpoint.requests]
    assert asked[0] == "[S]FFF\nFHFH\nFFFH\nHFFG\nActions: left, down, right, up"
    assert asked[1] == "(Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert asked[4] == "No action. Actions: left, down, right, up"


def test_gymnasium_ends_where_it_is_set_to(play):
    frozen = {"id": "FrozenLake-v1", "kwargs": {"is_slippery": False}}
    (ended,), _ = play(lambda messages: "fly", [{}], "gymnasium", invalid="end", **frozen)
    assert ended.turn_rewards == [0.0]
    (full,), _ = play(lambda m: 400 if turn_of(m) else "0", [{}], "gymnasium", **frozen)
    assert full.kind == "ok" and full.turn_rewards == [0.0]  # the context ends it
    (stopped,), _ = play(lambda messages: "0", [{}], "gymnasium", max_turns=3, **frozen)
    assert len(stopped.turn_rewards) == 3


@pytest.mark.parametrize(
    ("space", "answer", "action"),
    [
        ("Discrete(3, start=1)", "the 3", 3),
        ("Discrete(3)", "3", None),
        ("MultiDiscrete([2, 3])", "1, 2", [1, 2]),
        ("MultiDiscrete([2, 3])", "1 and 3", None),
        ("Box(-1, 1, (2,))", "0.5 -1e-1", [0.5, -0.1]),
        ("Box(-1, 1, (2,))", "0.5", None),
        ("Text(5)", "abc", "abc"),
    ],
)
def test_actions_of_spaces(space, answer, action):
    from gymnasium import spaces

    from hybridrl.environments.adapters.gymnasium import parse_action

    found = parse_action(answer, eval(f"spaces.{space}", {"spaces": spaces}))
    if isinstance(action, list):
        assert found.tolist() == pytest.approx(action)
    else:
        assert found == action


def test_observations_in_words():
    import numpy as np

    from hybridrl.environments.adapters.gymnasium import format_observation

    assert format_observation((np.int64(14), 10, np.array([0.25, 1e-7]))) == "14, 10, 0.25, 1e-07"
    assert (
        format_observation({"board": np.zeros((2, 2), np.int8), "turn": "x"})
        == "board: 0, 0, 0, 0\nturn: x"
    )


@contextlib.contextmanager
def openenv_server():
    """A server that speaks OpenEnv's protocol: two words that are to be said again."""

    async def schema(request):
        return web.json_response({"action": {"required": ["message"]}, "observation": {}})

    async def socket(request):
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        wanted, steps = "", 0
        async for message in socket:
            if message.type is not WSMsgType.TEXT:
                break
            told = json.loads(message.data)
            if told["type"] == "close":
                break
            if told["type"] == "reset":
                wanted, reward = f"word{told['data'].get('seed', 0)}", None
            elif "message" not in told["data"]:
                error = {"message": "no message", "code": "VALIDATION_ERROR"}
                await socket.send_json({"type": "error", "data": error})
                continue
            else:
                reward, steps = float(told["data"]["message"] == wanted), steps + 1
            data = {"observation": {"text": wanted}, "reward": reward, "done": steps == 2}
            await socket.send_json({"type": "observation", "data": data})
        return socket

    app = web.Application()
    app.router.add_get("/schema", schema)
    app.router.add_get("/ws", socket)
    loop, ports, started = asyncio.new_event_loop(), [], threading.Event()
    runner = web.AppRunner(app)

    async def serve():
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(site._server.sockets[0].getsockname()[1])
        started.set()

    def run():
        loop.create_task(serve())
        loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    started.wait()
    yield f"http://127.0.0.1:{ports[0]}"
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)


def test_openenv_is_played_over_its_protocol(play):
    def script(messages):
        return messages[-1]["content"] if turn_of(messages) else '{"text": "wrong key"}'

    with openenv_server() as url:
        options = {"url": url, "observation": "text"}
        (good,), _ = play(lambda m: m[-1]["content"], [{"seed": 4}], "openenv", **options)
        (bad,), _ = play(script, [{"seed": 4}], "openenv", **options)
    assert good.reward == 2.0 and good.turn_rewards == [1.0, 1.0]
    assert bad.kind == "error" and "no message" in bad.failure
    with pytest.raises(ConfigError, match="no OpenEnv server answers there"):
        EnvironmentPool(
            EnvironmentConfig(name="openenv", options={"url": "http://127.0.0.1:9"})
        ).load()


def test_tools_of_mcp_servers_are_called(play):
    """Which of them a row has, its column says."""

    def script(messages):
        if messages[-1]["role"] == "tool":
            return messages[-1]["content"]
        if "*" not in messages[0]["content"]:
            return "hello"
        a, b = messages[0]["content"].split("*")
        function = {"name": "multiply", "arguments": json.dumps({"a": int(a), "b": int(b)})}
        return {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}

    servers = {"calculator": {"command": [sys.executable, str(EXAMPLES / "mcp_tool.py")]}}
    rows = [{"prompt": "6*7", "tools": ["calculator"]}, {"prompt": "6*7", "tools": []}]
    rows += [{"prompt": "hello", "tools": "calculator, search"}]
    found, endpoint = play(script, rows, "mcp", servers=servers, column="tools")
    assert found[0].reward == 0.0 and found[0].metrics == {"turns": 2.0, "tool_calls": 1.0}
    said = dict(endpoint.requests)
    assert said["s0"]["messages"][-1]["content"] == "42"
    assert said["s0"]["tools"][0]["function"]["name"] == "multiply"
    assert "there is no tool `multiply`" in said["s1"]["messages"][-1]["content"]
    assert "`search`" in found[2].failure


def test_rows_of_an_environment_are_held_out_once():
    file = Path(__file__).parents[1] / "environments_that_fail.py"
    training, kept = list_environment_tasks(
        EnvironmentConfig(name=f"{file}:play", tasks=20), 5, seed=1
    )
    assert (len(training), len(kept)) == (20, 5)
    assert sorted(row["number"] for row in [*training, *kept]) == list(range(25))


def test_what_an_episode_may_return():
    assert parse_episode_score(1) == EpisodeScore(1.0) and parse_episode_score(None).reward is None
    told = parse_episode_score({"reward": 2, "turn_rewards": [1, 1], "metrics": {"a": True}})
    assert told == EpisodeScore(2.0, [1.0, 1.0], {"a": 1.0})
    for wrong in ("1", {"score": 1}, {"reward": "much"}, [1.0]):
        with pytest.raises(EpisodeError, match="expected a number, or a dictionary"):
            parse_episode_score(wrong)
    with pytest.raises(EpisodeError, match="the metric `x`"):
        parse_episode_score({"reward": 1, "metrics": {"x": math.inf}})
    for wrong in (
        math.inf,
        10**400,
        -1.1e6,
        EpisodeScore(math.nan),
        {"reward": 1, "turn_rewards": [math.inf]},
    ):
        with pytest.raises(EpisodeError, match=r"expected -1e\+06 to 1e\+06"):
            parse_episode_score(wrong)


@pytest.mark.more
@pytest.mark.parametrize(
    ("name", "kwargs", "actions"),
    [
        ("Blackjack-v1", {}, "011"),
        ("FrozenLake-v1", {"is_slippery": False}, "0111222"),
        ("CliffWalking-v1", {}, "0123"),
    ],
)
def test_scores_are_those_of_gymnasium(play, name, kwargs, actions):
    """Of 200 episodes, the answers that were given, played again, return what was reported."""
    import gymnasium

    draws = random.Random(0)
    found, endpoint = play(
        lambda messages: draws.choice([*actions, "hit me"]),
        [{"seed": seed} for seed in range(200)],
        "gymnasium",
        id=name,
        kwargs=kwargs,
        max_turns=12,
    )
    answers = defaultdict(list)
    for session, said in endpoint.answers:
        answers[session].append(said)
    for number, played in enumerate(found):
        environment, total = gymnasium.make(name, **kwargs), 0.0
        environment.reset(seed=number)
        for said in answers[f"s{number}"]:
            if said != "hit me":
                total += environment.step(int(said))[1]
        assert played.reward == played.metrics["return"] == total
    assert len({played.reward for played in found}) > 1


ASKS = """
import json, os, sys, urllib.request

def play(row, model):
    return ask(model.base_url, model.api_key)

def ask(url, key):
    body = json.dumps({"messages": [{"role": "user", "content": "?"}]}).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/chat/completions", body, headers)
    answer = json.load(urllib.request.urlopen(request, timeout=60))
    return float(answer["choices"][0]["message"]["content"])

if __name__ == "__main__":
    print(ask(os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"]))
"""


@pytest.mark.parametrize("kind", ["command", "function"])
def test_no_proxy_is_asked_for_the_endpoint(play, monkeypatch, tmp_path, kind):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    (file := tmp_path / "asks.py").write_text(ASKS)
    own = {"command": [sys.executable, str(file)]} if kind == "command" else {}
    name = "command" if kind == "command" else f"{file}:play"
    (played,), _ = play(lambda messages: "3", [{"prompt": "?"}], name, **own)
    assert (played.failure, played.reward) == (None, 3.0)


def test_further_hosts_need_no_proxy_and_earlier_ones_stay():
    given = {"NO_PROXY": "a.org, b.org", "no_proxy": "b.org", "PATH": "/bin"}
    found = with_direct_access(given, "10.0.0.2", "a.org")
    assert set(found["no_proxy"].split(",")) == {"a.org", "b.org", "10.0.0.2"}
    assert found["NO_PROXY"] == found["no_proxy"] and found["PATH"] == "/bin"
    assert with_direct_access({"no_proxy": "*"}, "10.0.0.2")["NO_PROXY"] == "*"
