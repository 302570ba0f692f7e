"""The sizes of a step: its calls, the lengths of samples, and how each role packs its samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from hybridrl.config.schema import Config
from hybridrl.layout.training_mesh import model_parallel_size
from hybridrl.placement import RolePlace
from hybridrl.trainers import load_trainer

if TYPE_CHECKING:
    from hybridrl.models.prompt_sharing_gain import LeastSaving


@dataclass(frozen=True)
class PlannedCall:
    """A call of a step as a plan needs it: the role, its phase and the number of samples.

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


class SampleLengths(NamedTuple):
    """The lengths of a job's samples, in tokens.

    Attributes:
        prompt: Of a prompt, in the mean.
        response: Of a response, in the mean.
        longest: Of the longest response of a step, for which generation waits.
    """

    prompt: float
    response: float
    longest: float

    @classmethod
    def alike(cls, prompt: float, response: float) -> SampleLengths:
        """Return the lengths of samples that are all equally long."""
        return cls(prompt, response, response)

    def __str__(self) -> str:
        tail = f"..{self.longest:.4g}" if self.longest > self.response else ""
        return f"{self.prompt:.4g}+{self.response:.4g}{tail}"


@dataclass(frozen=True)
class StepSizes:
    """The numbers of prompts, samples, tokens and updates of a step.

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
        """Return the mean number of tokens of a sample, prompt included."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens(self) -> int:
        """Return the number of tokens of all samples of a step, prompts included."""
        return round(self.samples * self.sample_tokens)


@dataclass(frozen=True)
class MicroBatchPlan:
    """The micro-batches into which one rank's share of the samples is packed.

    Attributes:
        count: How many.
        tokens: On one device in the fullest, prompts included.
        samples: In the fullest, of all sequence-parallel ranks.
        total: Tokens of this device's share.
        together: Number of samples for which a prompt is computed once.
        response_share: Share of response tokens in `total`.
        length: Length of samples that share nothing and have the same tokens and attention in all.
    """

    count: int
    tokens: int
    samples: int
    total: int
    together: int
    response_share: float
    length: float


def compute_step_sizes(config: Config, lengths: SampleLengths | None = None) -> StepSizes:
    """Compute the sizes of a step from the settings.

    Args:
        lengths: Of its samples; None: the longest that the settings allow.
    """
    data, rollout = config.data, config.rollout
    longest, per_prompt = rollout.max_tokens, rollout.samples_per_prompt
    kind = load_trainer(config.trainer.name).DATA
    if kind != "prompts":  # whose responses are there
        longest = data.max_response_tokens or data.max_prompt_tokens
        per_prompt = 2 if kind == "pairs" else 1
    tokens = lengths or SampleLengths.alike(data.max_prompt_tokens, longest)
    samples = data.prompts_per_step * per_prompt
    updates = config.actor.step_updates
    return StepSizes(data.prompts_per_step, samples, *tokens, updates)


def plan_micro_batches(
    config: Config,
    sizes: StepSizes,
    call: PlannedCall,
    place: RolePlace,
    least: LeastSaving | None,
) -> MicroBatchPlan:
    """Pack a role's samples, all of the same length, into micro-batches.

    Args:
        least: See `find_least_saving`.
    """
    dp = max(1, len(place.devices) // model_parallel_size(place.parallel))
    sharing = place.parallel.ring * place.parallel.ulysses
    rows = max(1, -(-call.samples // (call.updates * dp)))
    prompt, response = sizes.prompt_tokens, sizes.response_tokens
    budget = (config.actor.tokens_per_microbatch or sizes.tokens) * sharing
    group = min(rows, sizes.samples // sizes.prompts, call.samples // sizes.prompts)
    together = _count_together(sizes, group, budget, least)

    def count_tokens(samples: int) -> float:
        return max(1.0, -(-samples // together) * prompt + samples * response)

    fitting = together * max(1, int(budget // count_tokens(together)))
    fullest, whole = min(rows, fitting), count_tokens(rows)
    # Causal: a token is compared with half of its own part, and one of a response with its prompt.
    compared = -(-rows // together) * prompt**2 + rows * response * (2 * prompt + response)
    return MicroBatchPlan(
        count=-(-rows // fitting),
        tokens=max(1, round(count_tokens(fullest) / sharing)),
        samples=fullest,
        total=max(1, round(whole / sharing)),
        together=together,
        response_share=rows * response / whole,
        length=compared / whole,
    )


def _count_together(sizes: StepSizes, group: int, budget: float, least: LeastSaving | None) -> int:
    """Count the samples of a group for which its prompt is computed once: a group beyond the budget
    of a micro-batch is cut, as evenly as can be here."""
    prompt, response = sizes.prompt_tokens, sizes.response_tokens
    spared, whole = prompt * (group - 1), group * sizes.sample_tokens
    if least is None or group < 2 or not least.is_reached(spared, whole):
        return 1
    fitting = max(1, int((budget - prompt) // max(1.0, response)))
    return -(-group // -(-group // fitting))
