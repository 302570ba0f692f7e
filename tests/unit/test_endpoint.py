"""The endpoint as programs see it: OpenAI's own client, streams, errors, and who may ask."""

import errno
import http.client
import json
import socket
import threading
import time

import httpx
import openai
import pytest
from agent_cases import TRAINED, WEATHER, Pump, ScriptedEngine, endpoint_of, merging_tokenizer

from hybridrl.conversations.rendering import TemplateContext
from hybridrl.serving.agent_session import ANY, REPORT, SAMPLE

CALL = '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call>'


class Served:
    """An endpoint whose model says what the test wants, and a session of it."""

    def __init__(self, opening="", **options):
        self.tokenizer = merging_tokenizer("chatml")
        self.tokenizer.chat_template = opening + self.tokenizer.chat_template
        self.says = "hello there<|end|>"
        self.engine = ScriptedEngine(self.tokenizer, lambda prompt, seed: self.says)
        self.endpoint = endpoint_of(self.tokenizer, **options)
        self.pump = Pump(self.endpoint, self.engine)
        self.count = 0
        self.new_session()

    def new_session(self, sampling=TRAINED):
        self.count += 1
        self.session = self.endpoint.sessions.open(f"e{self.count}", sampling, self.count)
        self.url = self.endpoint.session_url(self.session)
        self.token = self.endpoint.sessions.token(SAMPLE, self.session.name)
        return self.session

    def client(self):
        return openai.OpenAI(base_url=self.url, api_key=self.token, max_retries=0)

    def post(self, path, body, **headers):
        kind = REPORT if path.endswith("/reward") else SAMPLE
        token = self.endpoint.sessions.token(kind, self.session.name)
        if not path.startswith("/session/") and "X-Session-ID" not in headers:
            token = self.endpoint.token
        headers = {"Authorization": f"Bearer {token}"} | headers
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return httpx.post(f"{self.endpoint.url}{path}", content=content, headers=headers)

    def close(self):
        self.pump.close()
        self.endpoint.close()


@pytest.fixture(scope="module")
def shared():
    served = Served(most_bytes=1 << 20)
    yield served
    served.close()


@pytest.fixture
def served(shared):
    shared.says = "hello there<|end|>"
    shared.engine.pace, shared.engine.poll_s = 7, 0.0
    shared.engine.requests.clear()
    shared.new_session()
    return shared


USER = [{"role": "user", "content": "hi"}]


def test_a_chat_with_its_tokens(served):
    found = served.client().chat.completions.create(model="m", messages=USER)
    (choice,) = found.choices
    assert choice.message.content == "hello there" and choice.finish_reason == "stop"
    (turn,) = served.session.end()
    assert choice.token_ids == turn.response_ids and choice.token_logprobs == turn.log_probs
    assert found.usage.completion_tokens == len(turn.response_ids) == 12
    assert found.usage.prompt_tokens == len(turn.prompt_ids)
    assert turn.versions == [3] * 12 and turn.mask == [1] * 12


def test_the_job_says_how_to_sample_and_the_program_when_to_end(served):
    client = served.client()
    client.chat.completions.create(
        model="m",
        messages=USER,
        temperature=0.1,
        top_p=0.3,
        seed=5,
        stop=["there"],
        max_completion_tokens=99,
        extra_body={"stop_token_ids": [44]},
    )
    sampling = served.engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p) == (TRAINED.temperature, TRAINED.top_p)
    assert sampling.stop == ("there",) and sampling.stop_token_ids == (44,)
    assert sampling.max_tokens == 99
    client.chat.completions.create(model="m", messages=USER, max_tokens=100_000)
    assert served.engine.requests[1].sampling.max_tokens == TRAINED.max_tokens


def test_a_stop_text_is_left_out_but_its_tokens_are_there(served):
    served.says = "one two three<|end|>"
    found = served.client().chat.completions.create(model="m", messages=USER, stop=["two"])
    assert found.choices[0].message.content == "one " and found.choices[0].finish_reason == "stop"
    assert served.tokenizer.decode(found.choices[0].token_ids) == "one two"


def test_tools_are_called_and_answered(served):
    served.says = f"Let me see.{CALL}{CALL}<|end|>"
    client, messages = served.client(), list(USER)
    first = client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])
    choice = first.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me see."
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"] * 2
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"place": "Bern"}
    assert len({call.id for call in choice.message.tool_calls}) == 2
    messages.append(choice.message.model_dump(exclude_none=True))
    for call in choice.message.tool_calls:
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "sunny"})
    served.says = "It is sunny.<|end|>"
    client.chat.completions.create(model="m", messages=messages, tools=[WEATHER])
    (branch,) = served.session.end()
    assert branch.sampled_turns == 2
    pairs = zip(branch.response_ids, branch.mask, strict=True)
    sampled = [token for token, is_sampled in pairs if is_sampled]
    assert served.tokenizer.decode(sampled) == f"Let me see.{CALL}{CALL}<|end|>It is sunny.<|end|>"


def test_without_permission_to_call_it_is_text(served):
    served.says = f"{CALL}<|end|>"
    found = served.client().chat.completions.create(
        model="m", messages=USER, tools=[WEATHER], tool_choice="none"
    )
    assert found.choices[0].message.content == CALL and found.choices[0].finish_reason == "stop"


def test_several_answers_are_branches(served):
    found = served.client().chat.completions.create(model="m", messages=USER, n=3)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    assert len({request.seed for request in served.engine.requests}) == 3
    branches = served.session.end()
    assert [branch.turns[0] for branch in branches] == [0, 1, 2]
    assert {tuple(branch.prompt_ids) for branch in branches} == {tuple(branches[0].prompt_ids)}


def test_log_probs_as_openai_writes_them(served):
    found = served.client().chat.completions.create(
        model="m",
        messages=USER,
        logprobs=True,
        top_logprobs=2,
        extra_body={"return_token_ids": True},
    )
    choice = found.choices[0]
    assert "".join(entry.token for entry in choice.logprobs.content) == "hello there<|end|>"
    assert [entry.logprob for entry in choice.logprobs.content] == choice.token_logprobs
    assert choice.logprobs.content[0].top_logprobs[0].token == "h"
    assert found.prompt_token_ids == served.session.end()[0].prompt_ids


@pytest.mark.parametrize("as_tokens", [False, True])
def test_completions(served, as_tokens):
    prompts = ["the one", "other"]
    ids = [served.tokenizer(text)["input_ids"] for text in prompts]
    found = served.client().completions.create(
        model="m", prompt=ids if as_tokens else prompts, n=2, logprobs=1, max_tokens=3
    )
    assert [choice.text for choice in found.choices] == ["hel"] * 4
    assert found.choices[0].finish_reason == "length"
    assert found.choices[0].logprobs.tokens == ["h", "e", "l"]
    assert found.choices[0].logprobs.text_offset == [0, 1, 2]
    assert found.usage.prompt_tokens == sum(map(len, ids))
    assert {tuple(branch.prompt_ids) for branch in served.session.end()} == set(map(tuple, ids))


def test_tokens_in_and_out(served):
    """As the package renderers asks, and reads the answer."""
    from renderers.client import _parse_completion_logprobs, parse_generate_response

    body = {
        "model": "m",
        "token_ids": [9, 8, 7],
        "sampling_params": {"stop_token_ids": [3], "logprobs": 1, "max_tokens": 50, "new": 1},
        "cache_salt": "x",
    }
    name = served.session.name
    raw = served.post("/inference/v1/generate", body, **{"X-Session-ID": name})
    data = parse_generate_response(raw.content)
    (choice,) = data["choices"]
    (turn,) = served.session.end()
    assert turn.prompt_ids == [9, 8, 7] and choice["token_ids"] == turn.response_ids
    assert _parse_completion_logprobs(choice, choice["token_ids"]) == turn.log_probs
    assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == turn.response_ids
    assert data["request_id"] and choice["finish_reason"] == "stop"


def test_a_stream_shows_text_as_it_grows(served):
    served.engine.pace, served.engine.poll_s, served.says = (
        2,
        0.02,
        "one two three four STOP five<|end|>",
    )
    pieces = list(
        served.client().chat.completions.create(
            model="m",
            messages=USER,
            stream=True,
            stop=["STOP"],
            stream_options={"include_usage": True},
        )
    )
    texts = [p.choices[0].delta.content or "" for p in pieces if p.choices]
    assert "".join(texts) == "one two three four " and len(list(filter(None, texts))) > 2
    assert pieces[0].choices[0].delta.role == "assistant"
    last = pieces[-2].choices[0]
    (turn,) = served.session.end()
    assert last.finish_reason == "stop" and last.token_ids == turn.response_ids
    assert pieces[-1].usage.completion_tokens == len(turn.response_ids)


def test_a_stream_of_calls_and_of_several_answers(served):
    served.says = f"Look:{CALL}<|end|>"
    found = {}
    for piece in served.client().chat.completions.create(
        model="m", messages=USER, tools=[WEATHER], stream=True, n=2
    ):
        for choice in piece.choices:
            got = found.setdefault(choice.index, {"content": "", "calls": [], "end": None})
            got["content"] += choice.delta.content or ""
            got["calls"] += choice.delta.tool_calls or []
            got["end"] = choice.finish_reason or got["end"]
    for got in found.values():
        assert got["content"] == "Look:" and got["end"] == "tool_calls"
        assert got["calls"][0].index == 0 and got["calls"][0].function.name == "weather"
    assert len(found) == 2


def test_a_stream_of_a_completion(served):
    pieces = served.client().completions.create(model="m", prompt="a", stream=True, max_tokens=50)
    assert "".join(piece.choices[0].text for piece in pieces) == "hello there"


def waits_for(condition):
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("streams", [False, True])
def test_a_program_that_goes_away_leaves_nothing(served, streams):
    served.engine.pace = None  # it generates for ever
    body = json.dumps({"model": "m", "messages": USER, "stream": streams})
    address = httpx.URL(served.url)
    connection = http.client.HTTPConnection(address.host, address.port)
    headers = {"Authorization": f"Bearer {served.token}"}
    connection.request("POST", f"{address.path}/chat/completions", body, headers)
    waits_for(lambda: served.engine.running)
    key = served.engine.requests[0].key
    connection.close()
    waits_for(lambda: key in served.engine.aborted)
    served.engine.pace = 7
    served.client().chat.completions.create(model="m", messages=USER)  # tries again
    first, second = served.engine.requests
    assert first.seed != second.seed
    (branch,) = served.session.end()
    assert branch.sampled_turns == 1
    waits_for(lambda: not served.session.under_way)  # the answer is sent just before


def test_parts_of_a_session_are_apart(served):
    client = openai.OpenAI(
        base_url=served.url.replace(f"/{served.session.name}/", f"/{served.session.name}.again1/"),
        api_key=served.token,
    )
    served.client().chat.completions.create(model="m", messages=USER)
    client.chat.completions.create(model="m", messages=USER)
    assert served.engine.requests[0].seed != served.engine.requests[1].seed
    (branch,) = served.session.end([f"{served.session.name}.again1"])
    assert branch.turns == [0] * 12


def test_requests_without_a_session_are_not_trained(served):
    body = {"model": "m", "messages": USER, "temperature": 0.3}
    answer = served.post("/v1/chat/completions", body).json()
    assert answer["choices"][0]["message"]["content"] == "hello there"
    assert served.engine.requests[0].sampling.temperature == 0.3
    assert not served.session.end()


def test_a_reward_is_reported(served):
    path = f"/session/{served.session.name}/reward"
    answer = served.post(path, {"reward": 0.5, "turn_rewards": [0.5], "metrics": {"steps": 3}})
    assert answer.status_code == 200
    report = served.session.report
    assert (report.reward, report.turn_rewards, report.metrics) == (0.5, [0.5], {"steps": 3.0})
    for body in ({}, {"reward": "x"}, {"reward": 1, "metrics": {"a": "b"}}, {"reward": 1e999}):
        assert served.post(path, body).status_code == 400
    many = {f"m{number}": 1.0 for number in range(257)}
    for wrong in (many, {"a" * 129: 1.0}, {"a\n": 1.0}):
        assert served.post(path, {"reward": 1.0, "metrics": wrong}).status_code == 400
    for body in ({"reward": 1.1e6}, {"reward": -1.1e6}, {"reward": 0, "turn_rewards": [1e7]}):
        assert "1e+06" in served.post(path, body).json()["error"]["message"]
    assert served.session.report is report


def test_the_model_is_told(served):
    (card,) = served.client().models.list().data
    assert card.id == "m" and card.max_model_len == 4096


CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
WRONG = [
    (CHAT, b"{", 400, None),
    (CHAT, b"[]", 400, None),
    (CHAT, b"[" * 200_000, 400, None),
    (CHAT, b"\xff\xfe", 400, None),
    (CHAT, {}, 400, "messages"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, {"messages": ["hi"]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        400,
        "messages[0].content",
    ),
    (CHAT, {"messages": USER, "n": 0}, 400, "n"),
    (CHAT, {"messages": USER, "n": True}, 400, "n"),
    (CHAT, {"messages": USER, "max_tokens": "9"}, 400, "max_tokens"),
    (CHAT, {"messages": USER, "temperature": -1}, 400, "temperature"),
    (CHAT, {"messages": USER, "temperature": 10**400}, 400, "temperature"),
    (CHAT, {"messages": USER, "stop": [1]}, 400, "stop"),
    (CHAT, {"messages": USER, "stop_token_ids": [100_000]}, 400, "stop_token_ids"),
    (CHAT, {"messages": USER, "stream": "yes"}, 400, "stream"),
    (CHAT, {"messages": USER, "tools": [{}]}, 400, "tools"),
    (CHAT, {"messages": USER, "tools": [WEATHER], "tool_choice": "maybe"}, 400, "tool_choice"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, 400, "response_format"),
    (CHAT, {"messages": USER, "model": "gpt"}, 404, "model"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * (1 << 19)}]}, 400, "messages"),
    (CHAT, {"messages": [{"role": "user", "content": "half \ud83d"}]}, 400, None),
    (COMPLETIONS, {"prompt": "x" * (1 << 19)}, 400, "messages"),
    (COMPLETIONS, {}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, 400, None),
    (COMPLETIONS, {"prompt": [1, "x"]}, 400, "prompt"),
    (COMPLETIONS, {"prompt": [100_000]}, 400, None),
    (COMPLETIONS, {"prompt": "x", "echo": True}, 400, "echo"),
    (GENERATE, {"token_ids": "x"}, 400, "token_ids"),
    (GENERATE, {"token_ids": [-1]}, 400, "token_ids"),
    (GENERATE, {"token_ids": [1], "sampling_params": 1}, 400, "sampling_params"),
    (
        GENERATE,
        {"token_ids": [1], "sampling_params": {"stream": True}},
        400,
        "sampling_params.stream",
    ),
    (f"/session/none{CHAT}", {"messages": USER}, 403, None),
    ("/v1/embeddings", {}, 404, None),
    ("/v1/models", {}, 405, None),
    (CHAT, b"x" * (2 << 20), 413, None),
]


@pytest.mark.parametrize("path, body, status, param", WRONG)
def test_errors_have_openais_shape(shared, path, body, status, param):
    answer = shared.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["message"] and error["type"] and error["param"] == param


def test_a_conversation_that_is_too_long_is_known_by_its_code(served):
    with pytest.raises(openai.BadRequestError) as caught:
        served.client().chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x" * 5000}]
        )
    assert caught.value.code == "context_length_exceeded"
    assert not served.session.end()


@pytest.mark.parametrize("token", [None, "", "Bearer wrong", "Basic x", "Bearer \xe4"])
def test_only_those_with_the_token_are_heard(shared, token):
    headers = {} if token is None else {"Authorization": token.encode("latin-1")}
    for path in ("/v1/models", "/episodes/next", "/nothing"):
        answer = httpx.get(f"{shared.endpoint.url}{path}", headers=headers)
        assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{shared.endpoint.url}/health").json()["status"] == "ok"


def test_a_token_is_for_one_session_and_one_purpose(shared):
    other, own = shared.session, shared.new_session()

    def token(session, scope=SAMPLE):
        return shared.endpoint.sessions.token(scope, session.name)

    of_all = shared.endpoint.sessions.token(SAMPLE, ANY)
    chat, reward = "/session/{}/v1/chat/completions", "/session/{}/reward"
    asked = {"messages": USER, "reward": 1.0}
    for path, given, status in [
        (chat, token(own), 200),
        (chat, of_all, 200),
        (chat, token(other), 403),
        (chat, token(own, REPORT), 403),
        (chat, shared.endpoint.token, 403),
        (reward, token(own, REPORT), 200),
        (reward, token(other, REPORT), 403),
        (reward, token(own), 403),
        (reward, of_all, 403),
        (reward, shared.endpoint.token, 403),
        (reward, token(own, REPORT).replace("report", "sample"), 401),
        (reward, token(own, REPORT).replace(own.name, other.name), 401),
        (reward, token(own, REPORT)[:-1], 401),
    ]:
        for url in (path.format(own.name), path.format(f"{own.name}.judge")):
            answer = httpx.post(
                f"{shared.endpoint.url}{url}",
                json=asked,
                headers={"Authorization": f"Bearer {given}"},
            )
            assert answer.status_code == status, (path, given, answer.text)
    for given, name, status in [
        (token(own), own.name, 200),
        (token(other), own.name, 403),
        (token(own), "", 403),
        (shared.endpoint.token, "", 200),
        (token(own, REPORT), "", 403),
    ]:
        headers = {"Authorization": f"Bearer {given}", "X-Session-ID": name}
        answer = httpx.post(f"{shared.endpoint.url}{CHAT}", json=asked, headers=headers)
        assert answer.status_code == status, (name, given, answer.text)
    headers = {"Authorization": f"Bearer {token(own)}"}
    answer = httpx.get(f"{shared.endpoint.url}/episodes/next", headers=headers)
    assert answer.status_code == 403 and "is for sampling in `e" in answer.text


def closed(connection):
    """Whether the other side has closed it."""
    connection.settimeout(60)
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_without_a_token_are_few_and_short(monkeypatch):
    monkeypatch.setattr("hybridrl.serving.endpoint.MOST_UNKNOWN", 4)
    served = Served()
    address = httpx.URL(served.url)
    idle = []
    try:
        client = served.client()
        client.models.list()  # keeps its connection
        for _ in range(12):
            idle.append(socket.create_connection((address.host, address.port), timeout=60))
            idle[-1].sendall(b"GET /health HTTP/1.1\r\nX: ")
        assert all(map(closed, idle[:8])), "the oldest go first"
        assert httpx.get(f"{served.endpoint.url}/health").status_code == 200
        monkeypatch.setattr("hybridrl.serving.endpoint.HEAD_S", 0)
        assert all(map(closed, idle[8:])), "and the others after a while"
        client.models.list()
        assert len(served.endpoint._connections._open) == 1
        client.close()
    finally:
        for connection in idle:
            connection.close()
        served.close()


def test_more_connections_than_the_job_can_bear_are_refused():
    served = Served()
    address = httpx.URL(served.url)
    served.endpoint._connections._most = 1
    try:
        with httpx.Client(headers={"Authorization": f"Bearer {served.token}"}) as client:
            assert client.get(f"{served.endpoint.url}/v1/models").status_code == 200
            with socket.create_connection((address.host, address.port), timeout=60) as further:
                assert b" 503 " in further.recv(4096).partition(b"\r\n")[0]
    finally:
        served.close()


def test_a_job_without_descriptors_says_so(shared, caplog):
    error = OSError(errno.EMFILE, "Too many open files")
    shared.endpoint._loop.call_exception_handler({"message": "accept", "exception": error})
    (record,) = caplog.records
    assert "takes no connections now" in record.message and "ulimit -n" in record.message


def test_nothing_listens_beyond_this_machine(shared):
    import psutil

    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    port = int(shared.endpoint.url.rpartition(":")[2])
    assert [address.ip for address in listening if address.port == port] == ["127.0.0.1"]


def test_a_session_that_ends_answers_nobody(served):
    served.engine.pace = None
    outcome = []

    def ask():
        with pytest.raises(openai.ConflictError) as caught:
            served.client().chat.completions.create(model="m", messages=USER)
        outcome.append(caught.value.code)

    thread = threading.Thread(target=ask)
    thread.start()
    waits_for(lambda: served.engine.running)
    session = served.session
    served.endpoint.close_session(session)
    thread.join(60)
    assert outcome == ["not_answered"]
    waits_for(lambda: not served.engine.running)
    with pytest.raises(openai.NotFoundError):
        served.client().chat.completions.create(model="m", messages=USER)


def test_requests_wait_for_a_generation_but_not_for_ever():
    tokenizer = merging_tokenizer("plain")
    endpoint = endpoint_of(tokenizer, patience_s=0.3)
    headers = {"Authorization": f"Bearer {endpoint.token}"}
    for body in ({"messages": USER}, {"messages": USER, "stream": True}):
        answer = httpx.post(f"{endpoint.url}{CHAT}", json=body, headers=headers)
        assert answer.status_code == 503 and answer.headers["Retry-After"]
    session = endpoint.sessions.open("e1", TRAINED, seed=1)
    session.under_way.update(range(-256, 0))
    own = {"Authorization": f"Bearer {endpoint.sessions.token(SAMPLE, session.name)}"}
    url = f"{endpoint.session_url(session)}/chat/completions"
    answer = httpx.post(url, json={"messages": USER}, headers=own)
    assert answer.status_code == 429 and "256 requests of this session" in answer.text
    endpoint.exchange._most_waiting = 0
    answer = httpx.post(f"{endpoint.url}{CHAT}", json={"messages": USER}, headers=headers)
    assert answer.status_code == 429
    endpoint.close()


def test_the_address_is_announced_to_this_user_alone(shared, tmp_path):
    path = tmp_path / "endpoint-actor-0.json"
    path.write_text("of an earlier run")
    shared.endpoint.announce(path)
    found = json.loads(path.read_text())
    assert found == {"url": shared.endpoint.url, "token": shared.endpoint.token, "model": "m"}
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_port_that_is_taken_is_a_sentence():
    from hybridrl.errors import ConfigError

    tokenizer = merging_tokenizer("plain")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(ConfigError, match=r"rollout\.serve_port"),
    ):
        endpoint_of(tokenizer, port=taken.getsockname()[1])


def test_what_is_no_http_is_answered_and_not_told(shared, caplog):
    host, _, port = shared.endpoint.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        connection.sendall(b"\x16\x03\x01 nonsense\r\n\r\n")
        assert b" 400 " in connection.recv(4096).partition(b"\r\n")[0]
    assert not caplog.records


SWITCH = "{% if reasoning_effort is defined %}{{ reasoning_effort + '!' }}{% endif %}"


@pytest.fixture(scope="module")
def switched():
    """An endpoint whose template reads `reasoning_effort`, which the job sets to `low`."""
    served = Served(SWITCH, context=TemplateContext({"reasoning_effort": "low"}))
    yield served
    served.close()


def test_options_of_a_request_reach_the_template_and_go_before_those_of_the_job(switched):
    def prompt_of(**further):
        switched.new_session()
        body = {"messages": USER, "return_token_ids": True, **further}
        found = switched.post(f"/session/e{switched.count}/v1/chat/completions", body)
        assert found.status_code == 200, found.text
        return switched.tokenizer.decode(found.json()["prompt_token_ids"])

    assert prompt_of().startswith("low!")
    assert prompt_of(reasoning_effort="high").startswith("high!")
    options = {"reasoning_effort": "none"}
    assert prompt_of(chat_template_kwargs=options).startswith("none!")
    assert prompt_of(reasoning_effort="high", chat_template_kwargs=options).startswith("none!")
    with switched.client().chat.completions.create(
        model="m", messages=USER, reasoning_effort="high", stream=True
    ) as stream:
        list(stream)
    *_, request = switched.engine.requests
    assert switched.tokenizer.decode(request.prompt_ids).startswith("high!")


@pytest.mark.parametrize(
    ("further", "param", "words"),
    [
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs", "reads"),
        ({"chat_template_kwargs": [1]}, "chat_template_kwargs", "must be an object"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "does not read"),
        ({"reasoning_effort": 3}, "reasoning_effort", "must be text"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "not supported"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
        ({"continue_final_message": True}, "continue_final_message", "not supported"),
    ],
)
def test_what_would_not_reach_the_template_is_refused(switched, further, param, words):
    found = switched.post("/v1/chat/completions", {"messages": USER} | further)
    error = found.json()["error"]
    assert found.status_code == 400 and error["param"] == param and words in error["message"]


def test_a_turn_that_was_asked_for_with_other_options_is_not_gone_on_with(switched):
    """With the same options the tokens that were sampled stay; with others the template speaks."""
    client = switched.client()
    for effort, branches in (("low", 1), ("high", 2)):
        session = switched.new_session()
        client = switched.client()
        first = client.chat.completions.create(model="m", messages=USER, reasoning_effort="low")
        said = first.choices[0].message.content
        messages = [*USER, {"role": "assistant", "content": said}, *USER]
        client.chat.completions.create(model="m", messages=messages, reasoning_effort=effort)
        assert len(session.end()) == branches
