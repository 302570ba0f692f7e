"""The plan of a heterogeneous generation pipeline: which layers each device computes, and in how
many bits.

Plain data: `hybridrl plan generation` makes it, a person may edit it, `rollout.engine=pipeline`
obeys it (`rollout.plan`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError

FULL_PRECISION_BITS = 16
"""Stands for the precision of the model, whatever it is."""
GENERATION_BITS = (4, 8, FULL_PRECISION_BITS)
_COMMAND_HINT = "`hybridrl plan generation` makes such a file."


@dataclass(frozen=True)
class GenerationStage:
    """One pipeline stage: its device and the bits of its layers.

    Attributes:
        device: Its number among the devices that share the model.
        bits: Of each of its layers, one after the other; `FULL_PRECISION_BITS`: as the model is.
        name: For people.
    """

    device: int
    bits: tuple[int, ...]
    name: str = ""


@dataclass(frozen=True)
class GenerationPlan:
    """A plan that splits a model's layers into generation stages over several devices.

    Attributes:
        stages: In the order in which a token goes through them.
        decode_micro_batches: Into so many groups the samples under way are divided.
        prefill_pieces: Into so many parts a group is divided for the pass over its prompts.
        kl: Nats a token by which the rounded model is off, as measured; None: it was not measured.
        predicted: Figures for people: seconds, tokens/s.
    """

    stages: tuple[GenerationStage, ...]
    decode_micro_batches: int
    prefill_pieces: int = 1
    kl: float | None = None
    predicted: Mapping[str, float] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """The number of layers of the model."""
        return sum(len(stage.bits) for stage in self.stages)

    @property
    def bits(self) -> dict[int, int]:
        """The bits of each layer, by its number."""
        return dict(enumerate(bits for stage in self.stages for bits in stage.bits))

    @property
    def is_rounded(self) -> bool:
        """True if any layer has fewer bits than the model's own precision."""
        return any(bits < FULL_PRECISION_BITS for bits in self.bits.values())

    def first_layer(self, number: int) -> int:
        """Return the number of the first layer of a stage."""
        return sum(len(stage.bits) for stage in self.stages[:number])

    def renumbered(self) -> GenerationPlan:
        """Return the plan with its devices renumbered from 0, in their order."""
        used = sorted(stage.device for stage in self.stages)
        stages = (replace(one, device=used.index(one.device)) for one in self.stages)
        return replace(self, stages=tuple(stages))


def make_equal_plan(layers: int, stages: int) -> GenerationPlan:
    """Build a plan with equally many layers per stage, as far as possible, in the model's
    precision.

    Raises:
        ConfigError: if there are fewer layers than stages.
    """
    if layers < stages:
        raise ConfigError(
            f"rollout.parallel.pp={stages}: the model has only {layers} layers, and every stage "
            f"has one at least. Set rollout.parallel.pp to at most {layers}."
        )
    whole = (FULL_PRECISION_BITS,) * layers
    equal = enumerate(split_evenly(layers, stages))
    return GenerationPlan(tuple(GenerationStage(n, whole[part]) for n, part in equal), stages)


def split_evenly(total: int, parts: int) -> list[slice]:
    """Split so many things into neighbouring parts that are equally large, as far as possible."""
    bounds = [total * number // parts for number in range(parts + 1)]
    return [slice(start, stop) for start, stop in itertools.pairwise(bounds)]


def format_generation_plan(plan: GenerationPlan) -> str:
    """Format a plan as JSON for `load_generation_plan`."""
    return json.dumps(asdict(plan), indent=1)


def load_generation_plan(path: str | Path) -> GenerationPlan:
    """Load the plan in a file.

    Raises:
        ConfigError: says what is wrong with it.
    """
    try:
        data = json.loads(Path(path).expanduser().read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"rollout.plan={path} could not be read: {error}. {_COMMAND_HINT}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"rollout.plan={path} is not JSON: {error}. {_COMMAND_HINT}") from error
    try:
        return _parse_plan(data)
    except ValueError as error:
        raise ConfigError(f"rollout.plan={path}: {error}. {_COMMAND_HINT}") from error


def _parse_plan(data: Any) -> GenerationPlan:
    """Parse a plan, and check that it describes a valid pipeline.

    Raises:
        ValueError: says what is wrong.
    """
    if not isinstance(data, Mapping):
        raise ValueError("it is not an object")
    if others := sorted(set(data) - set(GenerationPlan.__dataclass_fields__)):
        raise ValueError(f"`{others[0]}` is not known in it")
    stages = tuple(map(_parse_stage, _list(data.get("stages"), "stages")))
    kl = data.get("kl")
    if kl is not None and (isinstance(kl, bool) or not isinstance(kl, int | float)):
        raise ValueError(f"its kl is {kl!r}")
    if not isinstance(predicted := data.get("predicted") or {}, Mapping):
        raise ValueError(f"`predicted` is {predicted!r}, and has to be an object")
    micro_batches = _count(
        data.get("decode_micro_batches", len(stages) or 1), "decode_micro_batches"
    )
    pieces = _count(data.get("prefill_pieces", 1), "prefill_pieces")
    devices = [stage.device for stage in stages]
    if not devices:
        raise ValueError("it has no stages")
    if sorted(devices) != list(range(len(devices))):
        raise ValueError(
            f"its stages are on the devices {devices}, and each of 0 to {len(devices) - 1} has to "
            "have one"
        )
    for number, stage in enumerate(stages):
        if not stage.bits:
            raise ValueError(f"stage {number} has no layers")
        if low := sorted(set(stage.bits) - set(GENERATION_BITS)):
            raise ValueError(
                f"stage {number} has layers of {low} bits, and bits are {GENERATION_BITS}"
            )
    if kl is not None and not 0 <= kl < float("inf"):
        raise ValueError(f"its kl is {kl}")
    return GenerationPlan(stages, micro_batches, pieces, kl, predicted)


def _parse_stage(data: Any) -> GenerationStage:
    if not isinstance(data, Mapping):
        raise ValueError(f"a stage is {data!r}")
    device = data.get("device")
    if isinstance(device, bool) or not isinstance(device, int):
        raise ValueError(f"the device of a stage is {device!r}")
    bits = [_count(one, "bits") for one in _list(data.get("bits"), "bits")]
    return GenerationStage(device, tuple(bits), str(data.get("name", "")))


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"`{name}` is {value!r}, and has to be a list")
    return value


def _count(value: Any, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` is {value!r}, and has to be a number from 1 on")
    return value
