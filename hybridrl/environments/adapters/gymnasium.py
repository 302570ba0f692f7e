"""The adapter `gymnasium`: observations become text, responses become actions."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import gymnasium

from .environment_adapter import (
    AdapterEpisode,
    EnvironmentAdapter,
    EnvironmentSetupError,
    EpisodeReturn,
    EpisodeScore,
)
from .model_client import AsyncModelClient

_ANSI_COLOR = re.compile("\x1b\\[[0-9;]*m(.*?)\x1b\\[0m", re.DOTALL)
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:[eE]-?\d+)?")


class Adapter(EnvironmentAdapter):
    """An adapter for environments of Gymnasium. Options:

    * `id`, `kwargs`: of `gymnasium.make`; `import`: a module that registers it, if one has to;
    * `actions`: names of a discrete environment's actions, in their order; else they are numbers;
    * `prompt`: the first message, with `{observation}` and `{actions}`;
    * `system`: a message before it;
    * `observation`: `ansi`, as the environment draws itself in text (`render_mode="ansi"`), or
      `state`; by default the first, where there is one;
    * `invalid`: what an answer does that is no action: `end` or `continue`;
    * `invalid_reward`: what it costs;
    * `max_turns`: most turns of the model;
    * `request`: further fields of each request, such as `max_tokens`.

    The column `seed` of a row begins its episode.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        own = self.take(
            {
                "id": None,
                "kwargs": {},
                "import": None,
                "actions": None,
                "prompt": "{observation}\nActions: {actions}",
                "system": None,
                "observation": None,
                "invalid": "continue",
                "invalid_reward": 0.0,
                "max_turns": 50,
                "request": {},
            }
        )
        self._own = own
        if not own["id"]:
            raise EnvironmentSetupError("environment.name=gymnasium needs environment.options.id.")
        choices = {"invalid": ("end", "continue"), "observation": ("ansi", "state")}
        for option, values in choices.items():
            if own[option] is not None and own[option] not in values:
                raise EnvironmentSetupError(
                    f"environment.options.{option}={own[option]}: must be one of "
                    f"{', '.join(values)}."
                )
        if own["import"]:
            __import__(own["import"])
        try:
            spec = gymnasium.spec(own["id"])
        except gymnasium.error.Error as error:
            raise EnvironmentSetupError(f"environment.options.id={own['id']}: {error}") from error
        try:
            environment = gymnasium.make(spec, **own["kwargs"])
        except Exception as error:  # whatever its constructor says of its arguments
            raise EnvironmentSetupError(
                f"environment.options.id={own['id']} cannot be made with "
                f"environment.options.kwargs={own['kwargs']}: {error}"
            ) from error
        modes = environment.metadata.get("render_modes") or []
        space, names = environment.action_space, own["actions"]
        environment.close()
        self._draws = own["observation"] == "ansi" or (
            own["observation"] is None and "ansi" in modes
        )
        self._space = space
        spaces = gymnasium.spaces
        if not isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.Box | spaces.Text):
            raise EnvironmentSetupError(
                f"environment.options.id={own['id']} takes actions of {space}, which cannot be "
                "written as a text."
            )
        if names is not None and (not isinstance(space, spaces.Discrete) or len(names) != space.n):
            raise EnvironmentSetupError(
                f"environment.options.actions={names}: must name the actions of {space}, in their "
                "order."
            )
        self._names = None if names is None else [str(one) for one in names]
        self._said = _describe_actions(space, self._names)

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        own, model = self._own, AsyncModelClient(episode)
        environment, observation = self._begin(int(episode.row.get("seed", 0)))
        messages = [{"role": "system", "content": own["system"]}] if own["system"] else []
        messages.append({"role": "user", "content": self._first(observation)})
        rewards: list[float] = []
        total, invalid = 0.0, 0
        try:
            while len(rewards) < own["max_turns"]:
                if (text := await model.reply(messages, **own["request"])) is None:
                    break
                action = parse_action(text, self._space, self._names)
                if action is None:
                    invalid += 1
                    rewards.append(float(own["invalid_reward"]))
                    if own["invalid"] == "end":
                        break
                    said = f"No action. Actions: {self._said}"
                else:
                    found, reward, terminated, truncated, _ = environment.step(action)
                    rewards.append(float(reward))
                    total += float(reward)
                    if terminated or truncated:
                        break
                    said = self._text(environment, found)
                messages.append({"role": "user", "content": said})
                await asyncio.sleep(0)
        finally:
            environment.close()
        metrics = {"return": total, "turns": float(len(rewards)), "invalid": float(invalid)}
        return EpisodeScore(sum(rewards), rewards, metrics)

    async def rows(self, count: int) -> list[dict[str, Any]]:
        found = []
        for seed in range(count):
            environment, observation = self._begin(seed)
            environment.close()
            found.append({"prompt": self._first(observation), "seed": seed})
        return found

    def _begin(self, seed: int) -> tuple[Any, str]:
        """Build and reset an environment; return it with its first observation as text."""
        drawing: dict[str, Any] = {"render_mode": "ansi"} if self._draws else {}
        environment = gymnasium.make(self._own["id"], **drawing, **self._own["kwargs"])
        observation, _ = environment.reset(seed=seed)
        return environment, self._text(environment, observation)

    def _first(self, observation: str) -> str:
        return str(self._own["prompt"]).format(observation=observation, actions=self._said)

    def _text(self, environment: Any, observation: Any) -> str:
        if self._draws:  # what is coloured is where the player is
            return _ANSI_COLOR.sub(r"[\1]", str(environment.render())).strip()
        return format_observation(observation)


def format_observation(observation: Any) -> str:
    """Format an observation as text: numbers separated by commas, parts of a dictionary with their
    names."""
    if isinstance(observation, str):
        return observation
    if isinstance(observation, dict):
        return "\n".join(
            f"{name}: {format_observation(part)}" for name, part in observation.items()
        )
    if isinstance(observation, tuple | list):
        return ", ".join(map(format_observation, observation))
    if hasattr(observation, "tolist"):
        found = observation.tolist()
        return format_observation(found if isinstance(found, list) else float(found))
    return f"{observation:.4g}" if isinstance(observation, float) else str(observation)


def parse_action(answer: str, space: Any, names: list[str] | None = None) -> Any:
    """Return the action that a response ends with; None if there is none.

    Of a discrete space, the last word that is a name or a number of an action; of others, the
    numbers in the answer, if they are as many as the space takes and lie in it.
    """
    spaces = gymnasium.spaces
    if isinstance(space, spaces.Text):
        return answer if answer in space else None
    if isinstance(space, spaces.Discrete):
        known = {str(int(space.start) + n): int(space.start) + n for n in range(int(space.n))}
        if names is not None:
            known = {name.lower(): int(space.start) + n for n, name in enumerate(names)}
        if answer.strip().lower() in known:
            return known[answer.strip().lower()]
        words = [word for word in re.findall(r"[\w-]+", answer.lower()) if word in known]
        return known[words[-1]] if words else None
    import numpy

    numbers = [float(number) for number in _NUMBER.findall(answer)]
    if len(numbers) != int(numpy.prod(space.shape)):
        return None
    action = numpy.array(numbers).reshape(space.shape).astype(space.dtype)
    return action if action in space else None


def _describe_actions(space: Any, names: list[str] | None) -> str:
    if names is not None:
        return ", ".join(names)
    if isinstance(space, gymnasium.spaces.Discrete):
        return f"{int(space.start)} to {int(space.start) + int(space.n) - 1}"
    return str(space)
