"""The adapter `verifiers`: environments of verifiers 0.4 with their tasks, harnesses and rewards,
unchanged."""

from __future__ import annotations

import itertools
import os
import sys
import types
from pathlib import Path
from typing import Any

import verifiers.v1 as vf
from pydantic import ValidationError
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.configs.client import EvalClientConfig, TrainClientConfig
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.harness import Harness, HarnessConfig
from verifiers.v1.harnesses.utils.compaction import CONTEXT_OVERFLOW_MARKERS
from verifiers.v1.runtimes import ProgramResult, SubprocessConfig
from verifiers.v1.utils.loaders import default_harness_id, load_environment, resolve_env_config

from .environment_adapter import (
    MODEL_NAME,
    AdapterEpisode,
    EnvironmentAdapter,
    EnvironmentSetupError,
    EpisodeError,
    EpisodeReturn,
    EpisodeScore,
    import_file,
)
from .model_client import EndpointError, post_json
from .tool_servers import ToolServers

_HARNESS_MODULE = "hybridrl_chat"
_TOKEN_VARIABLE = "HYBRIDRL_API_KEY"
"""verifiers keeps variables of such names from the programs that it starts."""


class ChatHarness(Harness[HarnessConfig]):
    """A harness of verifiers that runs the conversation in this process and calls the task's tools
    until the model replies without a call; verifiers' own ones start a program per episode."""

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_MCP = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(  # type: ignore[override]
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> ProgramResult:
        system, prompt = self.resolve_prompt(data)
        messages = [{"role": "system", "content": system}] if system else []
        if isinstance(prompt, str):
            messages.append({"role": "user", "content": prompt})
        else:
            messages += [message_to_wire(message) for message in prompt or []]
        async with ToolServers({name: {"url": url} for name, url in mcp_urls.items()}) as tools:

            async def ask(**request: Any) -> dict[str, Any]:
                asked = {"model": ctx.model, **request}
                answer = await post_json(f"{endpoint}/chat/completions", secret, asked)
                return dict(answer["choices"][0]["message"])

            try:
                await tools.converse(ask, messages)
            except EndpointError as error:  # the trace knows why
                said = str(error).casefold()
                is_full = error.status in (400, 413) and any(
                    marker in said for marker in CONTEXT_OVERFLOW_MARKERS
                )
                return ProgramResult(exit_code=0 if is_full else 1, stdout="", stderr=str(error))
        return ProgramResult(exit_code=0, stdout="", stderr="")


class Adapter(EnvironmentAdapter):
    """An adapter for environments of verifiers. Options:

    * `id`: of the taskset: an installed package, one that ships with verifiers, or a file of yours,
      `path/to/file.py`;
    * `taskset`: its settings;
    * `env`: settings of the environment; `id` takes another than the taskset's own, and each role
      has its own, such as `agent: {max_turns: 4}`;
    * `client`: `chat`, the endpoint turns messages into tokens; `tokens`, that is done here, as
      verifiers does when it trains, and goes to `/inference/v1/generate`;
    * `tokenizer`: for `tokens`; by default the one that the endpoint names.

    A row has a column `task`, the task as JSON, or columns with the names of its fields.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        own = self.take({"id": None, "taskset": {}, "env": {}, "client": "chat", "tokenizer": None})
        if not own["id"]:
            raise EnvironmentSetupError(
                "environment.name=verifiers needs environment.options.id: a taskset that is "
                "installed, or path/to/file.py."
            )
        if own["client"] not in ("tokens", "chat"):
            raise EnvironmentSetupError(
                f"environment.options.client={own['client']}: must be `tokens` or `chat`."
            )
        self._client, self._tokenizer = own["client"], own["tokenizer"]
        self._keys: dict[str, str] = {}
        harness = types.ModuleType(_HARNESS_MODULE)
        vars(harness).update(__all__=["ChatHarness"], ChatHarness=ChatHarness)
        sys.modules[_HARNESS_MODULE] = harness
        taskset = {"id": _import_taskset(own["id"]), **own["taskset"]}
        try:
            config = resolve_env_config({"taskset": taskset, **own["env"]})
        except ValidationError as error:
            wrong = "; ".join(
                f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()
            )
            raise EnvironmentSetupError(
                f"environment.options.taskset and environment.options.env: {wrong}. verifiers says "
                f"so of {own['id']}."
            ) from error
        self._env = load_environment(_apply_role_defaults(config, own["env"]))

    async def start(self) -> None:
        self._serving = self._env.serving()
        await self._serving.__aenter__()

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        context = vf.ModelContext(
            model=MODEL_NAME, client=await self._client_of(episode), sampling=vf.SamplingConfig()
        )
        numbers = itertools.count()

        def named(trace: Any) -> None:
            number = next(numbers)
            trace.id = f"{episode.session}.{number}" if number else episode.session

        played = await self._env.run_episode(self._task(episode.row), context, on_trace=named)
        traces = [trace for trace in played.traces if trace.agent.trainable]
        if not played.ok:
            errors = [*played.errors, *(e for trace in played.traces for e in trace.errors)]
            told = [error.traceback or f"{error.type}: {error.message}" for error in errors]
            is_late = played.is_timeout or any(trace.is_timeout for trace in played.traces)
            raise EpisodeError(
                "\n".join(told) or "It ended without an error that it names.",
                "timeout" if is_late and not errors else "error",
            )
        rewards = {trace.id: trace.reward for trace in traces}
        metrics = _mean_metrics([trace.metrics for trace in traces])
        for trace in traces:
            if len(trace.rewards) > 1:
                parts = {f"reward_{name}": one.value for name, one in trace.rewards.items() if one}
                metrics |= parts
        mean = sum(rewards.values()) / len(rewards) if rewards else 0.0
        is_plain = len(played.traces) == 1 and set(rewards) == {episode.session}
        return EpisodeScore(mean, None, metrics, None if is_plain else rewards)

    async def rows(self, count: int) -> list[dict[str, Any]]:
        found = []
        for task in self._env.taskset.take(count):
            row = {"prompt": task.data.prompt_text, "task": task.data.model_dump_json()}
            if isinstance(answer := getattr(task.data, "answer", None), str):
                row["answer"] = answer
            found.append(row)
        return found

    def _task(self, row: dict[str, Any]) -> Any:
        kind = type(self._env.taskset).task_type()
        config = self._env.taskset.config.task
        data = kind.data_type()
        if isinstance(row.get("task"), str):
            return kind(data.model_validate_json(row["task"]), config)
        known = {name: value for name, value in row.items() if name in data.model_fields}
        return kind(data.model_validate(known), config)

    async def _client_of(self, episode: AdapterEpisode) -> Any:
        key = self._keys.setdefault(episode.token, f"{_TOKEN_VARIABLE}_{len(self._keys)}")
        os.environ[key] = episode.token
        # One address for all episodes, so that they share connections: the header `X-Session-ID`,
        # which verifiers sends with the name of a trace, tells them apart.
        settings = {"base_url": _endpoint_root(episode.url), "api_key_var": key}
        if self._client == "chat":
            return EvalClientConfig(**settings)
        if self._tokenizer is None:
            self._tokenizer = await _fetch_tokenizer_name(episode)
        return TrainClientConfig(renderer_model_name=self._tokenizer, **settings)


async def _fetch_tokenizer_name(episode: AdapterEpisode) -> str:
    """Return the tokenizer that the endpoint reports, which `client: tokens` needs."""
    import httpx

    async with httpx.AsyncClient() as client:
        headers = {"Authorization": f"Bearer {episode.token}"}
        answer = (await client.get(f"{_endpoint_root(episode.url)}/models", headers=headers)).json()
    found = answer["data"][0].get("root")
    if not found:
        raise EpisodeError(
            "The endpoint does not say where its tokenizer is. Set "
            "environment.options.tokenizer=<folder or hub name>, or environment.options.client="
            "chat."
        )
    return str(found)


def _endpoint_root(url: str) -> str:
    return f"{url.partition('/session/')[0]}/v1"


def _import_taskset(taskset: str) -> str:
    """Return the module name under which verifiers finds a taskset; a file is imported under its
    stem."""
    if not taskset.endswith(".py"):
        return taskset
    file = Path(taskset).expanduser().resolve()
    if not file.is_file():
        raise EnvironmentSetupError(f"environment.options.id={taskset}: there is no such file.")
    name = file.stem.lower().replace("-", "_")
    import_file(file, name)
    return name


def _apply_role_defaults(config: Any, given: dict[str, Any]) -> Any:
    """Return the settings in which roles without a harness use `ChatHarness`, and run in this
    process."""
    bundled = default_harness_id(config.taskset.id) != "bash"
    update = {}
    for role, agent in agent_config_fields(config).items():
        own = given.get(role) or {}
        changed: dict[str, Any] = {}
        if agent.harness is None and not bundled:
            changed["harness"] = HarnessConfig(id=_HARNESS_MODULE)
        if "runtime" not in own and type(agent.runtime).__name__ == "PrimeConfig":
            changed["runtime"] = SubprocessConfig()
        update[role] = agent.model_copy(update=changed)
    return config.model_copy(update=update)


def _mean_metrics(found: list[dict[str, Any]]) -> dict[str, float]:
    names = {name for one in found for name, value in one.items() if value is not None}
    values = {name: [one[name] for one in found if one.get(name) is not None] for name in names}
    return {name: sum(each) / len(each) for name, each in sorted(values.items())}
