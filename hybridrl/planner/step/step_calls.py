"""What a step works on: calls, and how each role packs its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hybridrl.config.schema import Config
from hybridrl.layout.training_mesh import devices_of
from hybridrl.placement import RolePlace
from hybridrl.trainers import load_trainer


@dataclass(frozen=True)
class Call:
    """One call of a step.

    Attributes:
        role: Who is called.
        phase: `sync`, `generate`, `score` or `train`.
        samples: On how many samples, of all ranks.
        updates: In how many optimizer updates, one after the other.
    """

    role: str
    phase: str
    samples: int
    updates: int = 1


class Lengths(NamedTuple):
    """In tokens.

    Attributes:
        prompt: Of a prompt, in the mean.
        response: Of a response, in the mean.
        longest: Of the longest response of a step, for which generation waits.
    """

    prompt: float
    response: float
    longest: float

    @classmethod
    def alike(cls, prompt: float, response: float) -> Lengths:
        """All samples are as long."""
        return cls(prompt, response, response)

    def __str__(self) -> str:
        tail = f"..{self.longest:.4g}" if self.longest > self.response else ""
        return f"{self.prompt:.4g}+{self.response:.4g}{tail}"


@dataclass(frozen=True)
class Sizes:
    """What a step works on.

    Attributes:
        prompts: Prompts, examples or pairs.
        samples: Rows that are learned from.
        prompt_tokens, response_tokens: Of one sample, in the mean.
        longest_response: Tokens of the longest response of a step.
        updates: Optimizer updates.
    """

    prompts: int
    samples: int
    prompt_tokens: float
    response_tokens: float
    longest_response: float
    updates: int

    @property
    def sample_tokens(self) -> float:
        """Of one sample, prompt included."""
        return self.prompt_tokens + self.response_tokens

    @property
    def response_share(self) -> float:
        """Of a sample's tokens, the part that is response."""
        return self.response_tokens / self.sample_tokens

    @property
    def tokens(self) -> int:
        """Of all samples of a step, prompts included."""
        return round(self.samples * self.sample_tokens)


@dataclass(frozen=True)
class MicroBatches:
    """What one rank's share of the samples is packed into.

    Attributes:
        count: How many.
        tokens: On one device in the fullest, prompts included.
        samples: In the fullest, of all sequence-parallel ranks.
        total: Tokens of this device's share.
    """

    count: int
    tokens: int
    samples: int
    total: int


def sizes_of(config: Config, lengths: Lengths | None = None) -> Sizes:
    """The sizes of a step.

    Args:
        lengths: Of its samples; None: the longest that the settings allow.
    """
    data, rollout = config.data, config.rollout
    longest, per_prompt = rollout.max_tokens, rollout.samples_per_prompt
    kind = load_trainer(config.trainer.name).DATA
    if kind != "prompts":  # whose responses are there
        longest = data.max_response_tokens or data.max_prompt_tokens
        per_prompt = 1 if kind == "examples" else 2
    tokens = lengths or Lengths.alike(data.max_prompt_tokens, longest)
    samples = data.prompts_per_step * per_prompt
    updates = config.actor.updates_per_step
    return Sizes(data.prompts_per_step, samples, *tokens, updates)


def micro_batches(config: Config, sizes: Sizes, call: Call, place: RolePlace) -> MicroBatches:
    """How a role packs its samples, all of the same length."""
    dp = max(1, len(place.devices) // devices_of(place.parallel))
    sharing = place.parallel.ring * place.parallel.ulysses
    rows = max(1, -(-call.samples // (call.updates * dp)))
    length = max(1.0, sizes.sample_tokens)
    fitting = max(1, int(config.actor.tokens_per_microbatch * sharing // length))
    together = min(rows, fitting)
    return MicroBatches(
        count=-(-rows // fitting),
        tokens=max(1, round(together * length / sharing)),
        samples=together,
        total=max(1, round(rows * length / sharing)),
    )
