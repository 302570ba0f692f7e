"""For tests of the endpoint: a program that talks with the model in all ways that programs have,
and what of a batch was sampled."""

from __future__ import annotations

import contextlib
import random

import httpx
from agent_cases import WEATHER

QUIRKS = ("plain", "edits", "retries", "several", "streams", "goes away", "compacts", "tokens")


class Conversation:
    """One program's, over plain HTTP.

    Args:
        quirk: One of `QUIRKS`, or None: it draws one.
    """

    def __init__(self, play, http: httpx.Client, quirk: str | None = None) -> None:
        self.play, self.http = play, http
        self.draw = random.Random(play.row["number"])
        self.quirk = quirk or self.draw.choice(QUIRKS)
        self.messages = [
            {"role": "system", "content": "be brief, be kind to the other one"},
            {"role": "user", "content": f"the question {play.row['number']}"},
        ]
        self.answers = 0

    def run(self, turns: int) -> float:
        for turn in range(turns):
            if self.quirk == "edits" and turn == 2:
                self.messages[1]["content"] = "another question"
            if self.quirk == "compacts" and turn == 2:
                self.messages[1:] = [{"role": "user", "content": "in short: go on"}]
            if self.quirk == "goes away" and turn == 1:
                with contextlib.suppress(httpx.TimeoutException):
                    self._ask(timeout=self.draw.choice([0.001, 0.01, 0.03]))
            answer = self._ask()
            if self.quirk == "retries" and turn == 1:
                answer = self._ask()
            self._go_on(answer)
        return float(self.answers)

    def _go_on(self, message):
        self.messages.append({k: v for k, v in message.items() if v is not None})
        for call in message.get("tool_calls") or []:
            content = f"sunny there, {call['function']['arguments']}"
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        if not message.get("tool_calls"):
            self.messages.append({"role": "user", "content": "and then in the other one?\n"})

    def _ask(self, timeout: float = 120.0):
        body = {"messages": self.messages, "tools": [WEATHER], "max_tokens": 200}
        body["n"] = 2 if self.quirk == "several" else 1
        body["stream"] = self.quirk == "streams"
        if self.quirk == "tokens":
            return self._generate(timeout)
        headers = {"Authorization": f"Bearer {self.play.token}"}
        url = f"{self.play.url}/chat/completions"
        answer = self.http.post(url, json=body, headers=headers, timeout=timeout)
        assert answer.status_code == 200, answer.text
        if self.quirk != "streams":
            choices = answer.json()["choices"]
            self.answers += len(choices)
            return choices[-1]["message"]
        self.answers += 1
        return _streamed(answer.text)

    def _generate(self, timeout):
        """Token ids in and out, all of them on this side."""
        self.ids = [*getattr(self, "ids", [5, 6, 7]), *self.draw.choices(range(6, 90), k=3)]
        url = self.play.url.removesuffix("/v1") + "/inference/v1/generate"
        headers = {"Authorization": f"Bearer {self.play.token}", "X-Session-ID": "of its own"}
        body = {"token_ids": self.ids, "sampling_params": {"max_tokens": 50}}
        answer = self.http.post(url, json=body, headers=headers, timeout=timeout)
        assert answer.status_code == 200, answer.text
        self.ids += answer.json()["choices"][0]["token_ids"]
        self.answers += 1
        return {"role": "assistant", "content": "as tokens"}


def _streamed(text: str):
    """The message that the events of a stream make."""
    import json

    message = {"role": "assistant", "content": "", "tool_calls": []}
    for line in text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                message["content"] += choice["delta"].get("content") or ""
                message["tool_calls"] += choice["delta"].get("tool_calls") or []
    return {name: value for name, value in message.items() if value}


def turns_of(batch):
    """All turns of the model in all branches of all rows: the tokens before, the tokens, their
    log-probabilities."""
    found = []
    for row in range(len(batch)):
        names = ("response_ids", "response_mask", "rollout_log_probs", "turn")
        own = [batch[name].rows()[row].tolist() for name in ("prompt_ids", *names)]
        branches = [own] if batch["branches"][row] else []
        further = [batch[f"branch_{name}"].rows()[row].tolist() for name in ("prompt_ids", *names)]
        start = [0, 0]
        lengths = (batch[f"branch_{kind}_lengths"].rows()[row] for kind in ("prompt", "response"))
        for prompt, response in zip(*map(list, lengths), strict=True):
            a, b = start[0] + int(prompt), start[1] + int(response)
            rest = (column[start[1] : b] for column in further[1:])
            branches.append([further[0][start[0] : a], *rest])
            start = [a, b]
        assert len(branches) == batch["branches"][row]
        turns = [turn for branch in branches for turn in _turns(*branch)]
        assert sorted(number for number, *_ in turns) == list(range(int(batch["turns"][row])))
        found += [tuple(turn) for _, *turn in turns]
    return found


def _turns(prompt, response, mask, log_probs, turns):
    ids = prompt + response
    for number in sorted(set(turns)):
        at = [place for place, of in enumerate(turns) if of == number and mask[place]]
        assert at == list(range(at[0], at[-1] + 1))
        before = ids[: len(prompt) + at[0]]
        yield number, before, [response[p] for p in at], [log_probs[p] for p in at]
