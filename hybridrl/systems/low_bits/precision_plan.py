"""A precision plan: the bits in which each rank computes each decoder layer. Plain data that a
planner writes, a person may edit and engines follow."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError

_PLAN_KIND = "precision"
SCORING, TRAINING = "scoring", "training"
_ALLOWED_BITS = {SCORING: (4, 8, 16, 32), TRAINING: (8, 16, 32)}
"""That each use may have. 16 of a model in float32 are bfloat16."""
DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}
"""Bits of the precisions that models compute in."""


@dataclass(frozen=True)
class RankPrecision:
    """The precision of each layer on one rank.

    Attributes:
        bits: By number of the layer, of those that are not whole.
        name: Of its device.
        share: Of the speed of the device that was measured.
        seconds: Predicted, of its part of a step; None: not known.
    """

    bits: Mapping[int, int] = field(default_factory=dict)
    name: str = ""
    share: float = 1.0
    seconds: float | None = None


@dataclass(frozen=True)
class PrecisionPlan:
    """A plan of the layers' precision on every rank of one role.

    Attributes:
        use: `scoring` or `training`.
        layers: Of the model.
        dtype: In which the model computes what is whole.
        ranks: In order; one alone is for all ranks that there are.
        found: What the planner saw: seconds of layers, indicators, measured KL. Nobody reads it
            but people.
    """

    use: str
    layers: int
    dtype: str
    ranks: Sequence[RankPrecision]
    found: Mapping[str, Any] = field(default_factory=dict)

    def of_rank(self, rank: int) -> Mapping[int, int]:
        """Return the bits of a rank's quantized layers, by layer."""
        mine = self.ranks[rank if len(self.ranks) > 1 else 0].bits
        return {layer: bits for layer, bits in mine.items() if bits < self.whole}

    @property
    def whole(self) -> int:
        """The number of bits of the model's own dtype."""
        return DTYPE_BITS[self.dtype]

    @property
    def low_layers(self) -> Sequence[int]:
        """The layers that are quantized on at least one rank."""
        return sorted(
            {n for rank in self.ranks for n, bits in rank.bits.items() if bits < self.whole}
        )

    def to_json(self) -> str:
        return json.dumps({"kind": _PLAN_KIND, **asdict(self)}, indent=2)

    @classmethod
    def load(cls, path: str, setting: str) -> PrecisionPlan:
        """Load the plan in a file.

        Args:
            setting: That names it, for messages.

        Raises:
            ConfigError: if there is no such file, or it holds no plan.
        """
        file = Path(path).expanduser()
        if not file.is_file():
            raise ConfigError(f"{setting}={path}: there is no such file.")
        try:
            return cls.from_json(file.read_text())
        except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
            raise ConfigError(
                f"{setting}={path}: this is no plan of precision ({type(error).__name__}: {error})."
                ' Expected {"kind": "precision", "use": "scoring", "layers": 2, "dtype": '
                '"float32", "ranks": [{"bits": {"0": 8}}]}, as `hybridrl plan precision` '
                "writes it."
            ) from error

    @classmethod
    def from_json(cls, text: str) -> PrecisionPlan:
        """Parse a plan from the JSON of `to_json`, or JSON that a person wrote in that form.

        Raises:
            ValueError, KeyError, TypeError, AttributeError: if it is none; says why.
        """
        read = json.loads(text)
        if read.get("kind") != _PLAN_KIND:
            raise ValueError(f"its kind is {read.get('kind')!r}")
        if read["use"] not in _ALLOWED_BITS:
            raise ValueError(f"its use is {read['use']!r}; there are {', '.join(_ALLOWED_BITS)}")
        if read["dtype"] not in DTYPE_BITS:
            raise ValueError(f"its dtype is {read['dtype']!r}; there are {', '.join(DTYPE_BITS)}")
        layers = read["layers"]
        if not isinstance(layers, int) or isinstance(layers, bool) or layers < 1:
            raise ValueError(f"layers is {layers!r}, and must be 1 or more")
        if not isinstance(read["ranks"], list) or not read["ranks"]:
            raise ValueError("ranks is no list of at least one")
        ranks = [_rank(one, layers, _ALLOWED_BITS[read["use"]]) for one in read["ranks"]]
        return cls(read["use"], layers, read["dtype"], ranks, dict(read.get("found", {})))


def _rank(read: Mapping[str, Any], layers: int, known: Sequence[int]) -> RankPrecision:
    bits = {int(layer): number for layer, number in read["bits"].items()}
    for layer, number in bits.items():
        if not 0 <= layer < layers:
            raise ValueError(f"it has bits for layer {layer} of a model of {layers}")
        if number not in known or isinstance(number, bool):
            raise ValueError(
                f"layer {layer} is to have {number!r} bits; there are {', '.join(map(str, known))}"
            )
    share, seconds = float(read.get("share", 1.0)), read.get("seconds")
    if not (0 < share < math.inf):
        raise ValueError(f"share is {share}, and must be above 0")
    return RankPrecision(
        bits, str(read.get("name", "")), share, None if seconds is None else float(seconds)
    )


def find_precision_setting(config: Config, role: str) -> tuple[str, str] | None:
    """Return the setting that names a role's precision plan, and the file; None if it has none."""
    path = parse_role_model(config, role).precision
    return None if path is None else (f"models.{role}.precision", path)


def load_precision_plan(config: Config, role: str) -> PrecisionPlan | None:
    """Load the precision plan of a role; None if it has none.

    Raises:
        ConfigError: if the file holds none.
    """
    found = find_precision_setting(config, role)
    return None if found is None else PrecisionPlan.load(found[1], found[0])


def list_precision_notices(config: Config, roles: Iterable[str]) -> list[str]:
    """Return a notice for each role that computes with fewer bits."""
    found = []
    for role in roles:
        if (named := find_precision_setting(config, role)) is None:
            continue
        setting, path = named
        plan = PrecisionPlan.load(path, setting)
        low = plan.low_layers
        kls = plan.found.get("token_kl")
        # People may have written there what they like.
        measured = [kl for kl in kls if isinstance(kl, float)] if isinstance(kls, list) else []
        said = f"; measured, that changed {max(measured):.2g} nats a token" if measured else ""
        found.append(
            f"{setting}: {role} computes {len(low)} of {plan.layers} layers in fewer bits"
            f"{'' if len(plan.ranks) == 1 else ' on some ranks'} "
            f"({', '.join(map(str, low)) or 'none'}){said}."
        )
    return found
