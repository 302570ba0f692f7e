"""For tests of the endpoint: tokenizers that merge, three chat templates, an engine that samples
from a script, and programs that run in threads of this process."""

from __future__ import annotations

import json
import queue
import random
import threading
import time
import traceback
from collections.abc import Callable

from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS
from hybridrl.environments.episode_request import EpisodeResult
from hybridrl.rollout.rollout_engine import EngineOutput, RolloutEngine, SamplingSettings
from hybridrl.serving.endpoint import ReplicaEndpoint
from hybridrl.serving.routes import ServedModel
from hybridrl.serving.template_chat import TemplateRenderer

PLAIN = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|end|>' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
CHATML = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{% endfor %}{{ '<|end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|end|>\\n' }}{% endif %}
{%- else %}{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' and loop.last %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{{- (message.content or '').split('</think>')[-1] if message.role == 'assistant' else
    message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n<tool_call>\\n' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '\\n</tool_call>' }}{% endfor %}{{ '<|end|>\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
"""As Qwen3's: a tool's answer is the user's, and what was thought in earlier turns is left out."""
LLAMA = """\
{{- '<|begin|>' }}{% if tools %}{{ '<|im_start|>system<|close|>\\n\\n' }}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ '\\n\\n' }}{% endfor %}
{{- '<|end|>' }}{% endif %}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|im_start|>' + role + '<|close|>\\n\\n' + (message.content or '') | trim }}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}
{{- '{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{ '}</tool_call>' }}{% endfor %}{{ '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|close|>\\n\\n' }}{% endif %}"""
"""As Llama 3's: headers of their own, and contents without space around them."""
TEMPLATES = {"plain": PLAIN, "chatml": CHATML, "llama": LLAMA}
SPECIAL = ["<pad>", "<unk>", "<|im_start|>", "<|end|>", "<|begin|>", "<|close|>"]
MERGED = ("th", "in", "he", "ll", "ab", "or", "an", "er", "oo", "st")

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a place",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    },
}


def merging_tokenizer(template: str):
    """A tokenizer of printable ASCII that also has tokens of two characters: what a model samples
    letter by letter is not what the tokenizer makes of the same text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = PRINTABLE_CHARACTERS.translate(str.maketrans({" ": "Ġ", "\n": "Ċ"}))
    tokens = [*SPECIAL, *letters, *MERGED]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [(pair[0], pair[1]) for pair in MERGED]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        extra_special_tokens=SPECIAL[2:],
    )
    found.chat_template = TEMPLATES[template]
    return found


def letters(tokenizer, text: str) -> list[int]:
    """Text as tokens of one character each, but for special tokens."""
    tokens = []
    for place, part in enumerate(text.split("<|end|>")):
        tokens += [tokenizer.eos_token_id] * bool(place)
        spelled = part.translate(str.maketrans({" ": "Ġ", "\n": "Ċ"}))
        tokens += tokenizer.convert_tokens_to_ids(list(spelled))
    return tokens


def any_turn(prompt_ids: list[int], seed: int) -> str:
    """A turn of a model that answers, thinks, and calls tools, well or badly."""
    draw = random.Random(seed)
    words = ["the", "hello ", " then", "in order", "stable", "\n", "1+1=2", "{", "<tool_call>"]
    text = "".join(draw.choices(words, k=draw.randint(1, 6)))
    if draw.random() < 0.2:
        text = f"<think>let us see</think>{text}"
    for _ in range(draw.choice([0, 0, 1, 1, 2])):
        arguments = {"place": draw.choice(["Bern", "the other one"])}
        call = json.dumps(
            {"name": "weather", "arguments": arguments}, indent=draw.choice([None, 1])
        )
        text += f"{draw.choice(['', ' '])}<tool_call>{call}</tool_call>"
    return text + "<|end|>" * (draw.random() < 0.9)


class ScriptedEngine(RolloutEngine):
    """Samples what a script says, a few tokens at each poll.

    Args:
        script: From the prompt and the seed to the text of a turn, which is spelled in letters.

    Attributes:
        sampled: All that it finished: prompt, tokens, log-probabilities.
        aborted: Keys.
        pace: Tokens at each poll; None: it generates nothing.
        poll_s: How long a poll takes.
    """

    def __init__(self, tokenizer, script: Callable[[list[int], int], str] = any_turn, pace=7):
        self.tokenizer, self.script, self.pace = tokenizer, script, pace
        self.poll_s = 0.0
        self.running, self.sampled, self.aborted, self.requests = {}, [], [], []

    def start(self, request):
        assert request.samples == 1
        self.requests.append(request)
        tokens = letters(self.tokenizer, self.script(request.prompt_ids, request.seed))
        tokens, reason = tokens[: request.sampling.max_tokens], "length"
        for place, token in enumerate(tokens):
            text = self.tokenizer.decode(tokens[: place + 1], skip_special_tokens=True)
            ends = token in (self.tokenizer.eos_token_id, *request.sampling.stop_token_ids)
            if ends or any(stop in text for stop in request.sampling.stop):
                tokens, reason = tokens[: place + 1], "stop"
                break
        draw = random.Random(request.seed)
        log_probs = [-draw.randrange(2**20) / 2**20 for _ in tokens]  # exact in single precision
        self.running[request.key] = [request, tokens, log_probs, reason, 0]

    def poll(self):
        time.sleep(self.poll_s)
        done = []
        for key, sample in list(self.running.items()):
            request, tokens, log_probs, reason, length = sample
            sample[4] = length + (self.pace or 0)
            if sample[4] >= len(tokens) and self.pace:
                del self.running[key]
                done.append(EngineOutput(key, request.prompt_ids, tokens, log_probs, reason))
        self.sampled += [(one.prompt_ids, one.token_ids, one.log_probs) for one in done]
        return done

    def progress(self):
        return {key: sample[4] for key, sample in self.running.items()}

    def partial(self):
        return {key: sample[1][: sample[4]] for key, sample in self.running.items()}

    def abort(self, keys):
        for key in keys:
            self.aborted.append(key)
            self.running.pop(key, None)

    def cancel(self):
        self.running.clear()

    def load(self, weights):
        raise NotImplementedError


class ThreadPrograms:
    """Plays episodes by calling a function of this process, each in a thread.

    Args:
        play: From the play to its reward; what it raises is the failure of the episode.
    """

    def __init__(self, play, notify):
        self.play, self.notify = play, notify
        self.done: queue.SimpleQueue[EpisodeResult] = queue.SimpleQueue()
        self.groups = []

    def start(self, group):
        self.groups.append([play.session for play in group])
        for play in group:
            threading.Thread(target=self._run, args=(play,), daemon=True).start()

    def _run(self, play):
        played = EpisodeResult(play.key, float("nan"), None, {}, None, "error")
        try:
            found = self.play(play)
            found = (
                found
                if isinstance(found, EpisodeResult)
                else played._replace(reward=found, kind="ok")
            )
        except Exception:
            found = played._replace(failure=traceback.format_exc())
        self.done.put(found)
        self.notify()

    def poll(self, wait_s=0.0):
        found = []
        while not self.done.empty():
            found.append(self.done.get())
        return found

    def cancel(self):
        pass

    def close(self):
        pass


def sampled_turn(done):
    return done._replace(versions=[3] * len(done.token_ids))


class Pump:
    """Polls an engine for an endpoint in a thread, as `AgentGenerator` does."""

    def __init__(self, endpoint: ReplicaEndpoint, engine: RolloutEngine):
        self.endpoint, self.engine, self.stopping = endpoint, engine, False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self):
        exchange, running = self.endpoint.exchange, set()
        while not self.stopping:
            if not running:
                exchange.wait(0.05)
            for request in exchange.requests():
                self.engine.start(request)
                running.add(request.key)
            dropped = exchange.dropped()
            self.engine.abort(dropped)
            running.difference_update(dropped)
            if running:
                done = self.engine.poll()
                running.difference_update(one.key for one in done)
                exchange.answer({one.key: sampled_turn(one) for one in done})
                if exchange.streams:
                    exchange.grow(self.engine.partial())

    def close(self):
        self.stopping = True
        self.endpoint.exchange.wake()
        self.thread.join(60)


def endpoint_of(tokenizer, context=None, context_length=4096, **options) -> ReplicaEndpoint:
    """An endpoint with the template's chat."""
    chat = TemplateRenderer(tokenizer, context)
    model = ServedModel("m", tokenizer, chat, len(tokenizer), context_length)
    return ReplicaEndpoint(model, **options)


TRAINED = SamplingSettings(256, temperature=0.7)
