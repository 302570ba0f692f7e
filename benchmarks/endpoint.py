"""The HTTP endpoint of a replica, with vLLM behind it.

    python benchmarks/endpoint.py [--sessions 64] [--tokens 128] [--hidden 512] [--rounds 5]
    python benchmarks/endpoint.py --load [--minutes 10] [--sessions 200]

Throughput: tokens a second of so many programs that ask for a chat completion each, all at the same
time and from a process of their own, against one batch of the same prompts given to the engine.

Load: for so long as many programs have conversations of three turns, and one request in five is
given up before it is answered. Every answer that a program got must be in the samples just once;
what it did not get may be there only if it was answered in that moment. Memory of the process is
compared between the first and the last third of the time.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import multiprocessing
import os
import random
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from figures import interleave, report

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import EnvironmentConfig, RolloutConfig
from hybridrl.controller import WorkerContext
from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
from hybridrl.environments.episode_request import EpisodeRequest, EpisodeResult
from hybridrl.models.model_loading import make_tiny_model
from hybridrl.parallel.process_group import join_group_world
from hybridrl.rollout import SamplingSettings
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.rollout.vllm_engine import VLLMEngine
from hybridrl.serving.agent_rollout import AgentGenerator
from hybridrl.serving.endpoint import ReplicaEndpoint
from hybridrl.serving.routes import ServedModel
from hybridrl.serving.template_chat import TemplateRenderer
from hybridrl.system.shared_memory import remove_shared_memory

CPU = torch.device("cpu")
CONTEXT = 1024
GIVEN_UP = 0.2


def messages_of(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"What is {number} and {number + 1}? " + "Think. " * 8}]


class OtherProcess:
    """Plays episodes in a process of its own, all at the same time.

    Attributes:
        answers: By session, the tokens of each answer that its program got.
        given_up: Requests that programs gave up.
    """

    def __init__(self, turns: int, given_up: float, notify: Any) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawn.Pipe()
        self._process = spawn.Process(target=play_all, args=(theirs, turns, given_up), daemon=True)
        self._process.start()
        theirs.close()
        self._done: list[EpisodeResult] = []
        self.answers: dict[str, list[tuple[int, ...]]] = {}
        self.given_up = 0
        self._notify = notify
        threading.Thread(target=self._receive, daemon=True).start()

    def start(self, group: Sequence[EpisodeRequest]) -> None:
        self._pipe.send([tuple(play) for play in group])

    def poll(self, wait_s: float = 0.0) -> list[EpisodeResult]:
        done, self._done = self._done, []
        return done

    def cancel(self) -> None:
        pass

    def close(self) -> None:
        self._pipe.close()
        self._process.terminate()

    def _receive(self) -> None:
        while True:
            try:
                key, session, answers, given_up = self._pipe.recv()
            except (EOFError, OSError):
                return
            self.answers[session] = answers
            self.given_up += given_up
            self._done = [*self._done, EpisodeResult(key, 1.0, None, {}, None, "ok")]
            self._notify()


def play_all(pipe: Connection, turns: int, given_up: float) -> None:
    """The program of the other process."""
    asyncio.run(_play_all(pipe, turns, given_up))


async def _play_all(pipe: Connection, turns: int, given_up: float) -> None:
    import aiohttp

    loop, tasks = asyncio.get_running_loop(), set()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(600)
    ) as http:
        while True:
            try:
                group = await loop.run_in_executor(None, pipe.recv)
            except EOFError:
                return
            for play in map(EpisodeRequest._make, group):
                task = loop.create_task(_play(http, pipe, play, turns, given_up))
                tasks.add(task)
                task.add_done_callback(tasks.discard)


async def _play(
    http: Any, pipe: Connection, play: EpisodeRequest, turns: int, given_up: float
) -> None:
    messages, answers, lost = messages_of(play.row["number"]), [], 0
    draw = random.Random(play.session)
    headers = {"Authorization": f"Bearer {play.token}"}
    for _ in range(turns):
        while True:
            ask = http.post(
                f"{play.url}/chat/completions", json={"messages": messages}, headers=headers
            )
            try:
                async with asyncio.timeout(
                    draw.uniform(0, 1.5) if draw.random() < given_up else None
                ):
                    async with ask as answer:
                        assert answer.status == 200, await answer.text()
                        choice = (await answer.json())["choices"][0]
                break
            except TimeoutError:
                lost += 1
        answers.append(tuple(choice["token_ids"]))
        messages += [choice["message"], {"role": "user", "content": "And then?"}]
    pipe.send((play.key, play.session, answers, lost))


def vllm_engine(folder: Path, hidden: int, sessions: int, kv_gib: float, job: str) -> VLLMEngine:
    """Memory of the KV cache counts from its first use: the less there is, the sooner all of it."""
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    make_tiny_model(
        folder, tokenizer, seed=0, hidden_size=hidden, layers=2, heads=hidden // 32, context=CONTEXT
    )
    return VLLMEngine(
        EngineSetup(
            str(folder),
            str(folder),
            "float32",
            context_length=CONTEXT,
            eos_token_ids=[tokenizer.eos_token_id],
            device=CPU,
            seed=0,
            job=job,
            stop_texts=True,
        ),
        RolloutConfig(kv_cache_gib=kv_gib, max_sequences=sessions),
    )


def served(engine: VLLMEngine, turns: int, given_up: float) -> AgentGenerator:
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True)
    chat = TemplateRenderer(tokenizer)
    endpoint = ReplicaEndpoint(ServedModel("tiny", tokenizer, chat, len(tokenizer), CONTEXT))
    programs = OtherProcess(turns, given_up, endpoint.exchange.wake)
    return AgentGenerator(engine, endpoint, programs, EnvironmentConfig())


def throughput(engine: VLLMEngine, sessions: int, tokens: int, rounds: int) -> None:
    chat = TemplateRenderer(build_character_tokenizer(PRINTABLE_CHARACTERS, chat=True))
    prompts = [torch.tensor(chat.prompt(messages_of(n), [])) for n in range(sessions)]
    batch = Batch.from_columns({"prompt_ids": prompts, "number": list(range(sessions))})
    sampling = SamplingSettings(tokens, min_tokens=tokens)  # as many in both arms
    seeds = itertools.count(0, sessions)
    rollout = served(engine, 1, 0.0)

    def rate(generate: Any) -> float:
        start = time.perf_counter()
        made = generate(batch, sampling, next(seeds))
        sampled = int(made.lengths("response_ids").sum())
        assert sampled == sessions * tokens
        return sampled / (time.perf_counter() - start)

    for generate in (rollout.generate, engine.generate):  # warm
        rate(generate)
    ours, direct = interleave(lambda: rate(rollout.generate), lambda: rate(engine.generate), rounds)
    rollout.programs.close()
    rollout.endpoint.close()
    report("endpoint_throughput", ours, direct, ">= 0.9", "tokens/s")


def load(engine: VLLMEngine, sessions: int, minutes: float) -> None:
    rollout = served(engine, 3, GIVEN_UP)
    programs, process = rollout.programs, psutil.Process()
    numbers = list(range(sessions))
    batch = Batch.from_columns({"prompt_ids": [torch.tensor([5])] * sessions, "number": numbers})
    memory: list[int] = []
    episodes = answered = lost = doubled = late = 0
    until = time.monotonic() + 60 * minutes
    while time.monotonic() < until:
        made = rollout.generate(batch, SamplingSettings(32), seed=episodes)
        recorded = Counter(sampled_turns(made))
        received = Counter(ids for answers in programs.answers.values() for ids in answers)
        episodes += len(made)
        answered += received.total()
        lost += (received - recorded).total()
        late += (recorded - received).total()
        assert made["finish_reason"].count("error") == 0
        programs.answers.clear()
        memory.append(process.memory_info().rss)
    doubled = max(0, late - programs.given_up)
    third = max(1, len(memory) // 3)
    rollout.programs.close()
    rollout.endpoint.close()
    print(f"{episodes} episodes, {answered} answers, {programs.given_up} requests given up")
    print("MiB after each generation:", *(rss >> 20 for rss in memory))
    print(f"{late} turns kept that were answered just when they were given up")
    report("endpoint_lost_or_doubled", lost + doubled, answered, "== 0", "turns")
    first, last = statistics.median(memory[:third]), statistics.median(memory[-third:])
    report("endpoint_memory", last / 2**20, first / 2**20, "<= 1.02", "MiB of the last third")


def sampled_turns(made: Batch) -> list[tuple[int, ...]]:
    """The tokens of every turn of the model, in all branches."""
    found = []
    for prefix in ("", "branch_"):
        names = (f"{prefix}{name}" for name in ("response_ids", "response_mask", "turn"))
        for ids, mask, turns in zip(*(made[name].rows() for name in names), strict=True):
            sampled = mask.bool()
            for _, group in itertools.groupby(
                zip(turns[sampled].tolist(), ids[sampled].tolist(), strict=True),
                lambda pair: pair[0],
            ):
                found.append(tuple(token for _, token in group))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load", action="store_true")
    parser.add_argument("--minutes", type=float, default=10.0)
    options = parser.parse_args()
    sessions = options.sessions or (200 if options.load else 64)
    job = f"hybridrl-{os.getpid()}-endpoint"
    with tempfile.TemporaryDirectory() as folder:
        join_group_world(WorkerContext("generator", 0, 1))
        hidden, kv_gib = (64, 0.1) if options.load else (options.hidden, 1.0)
        engine = vllm_engine(Path(folder), hidden, sessions, kv_gib, job)
        try:
            if options.load:
                load(engine, sessions, options.minutes)
            else:
                throughput(engine, sessions, options.tokens, options.rounds)
        finally:
            engine.close()
            remove_shared_memory(job)


if __name__ == "__main__":
    main()
