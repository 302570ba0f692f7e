"""A piece of work that a device does, and who may predict how long it takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

FORWARD, TRAIN, DECODE, HEAD, HEAD_TRAIN, OPTIMIZER, GATHER = OPERATORS = (
    *("forward", "train", "decode", "head", "head train", "optimizer", "gather"),
)


@dataclass(frozen=True)
class OperatorWork:
    """A description of an operator: its kind and its sizes.

    Attributes:
        op: One of `OPERATORS`.
        tokens: That it works on; rows for `decode`, elements for `optimizer`, bytes that each rank
            receives for `gather`.
        length: Tokens of a sample, or in the cache.
        hidden: Width of the states.
        parameters: That a token is multiplied with, of a layer or a head.
        query, key_value: Elements of a token's queries, and of its keys and values.
        item: Bytes of an element.
    """

    op: str
    tokens: float
    length: float = 1.0
    hidden: float = 1.0
    parameters: float = 1.0
    query: float = 1.0
    key_value: float = 1.0
    item: int = 4

    @property
    def operations(self) -> float:
        """Return the floating-point operations of its products: two for each parameter and token,
        and attention over the tokens before."""
        layer = 2 * self.tokens * self.parameters
        attention = 2 * self.tokens * self.length * self.query
        return {
            FORWARD: layer + attention,
            TRAIN: 3 * (layer + attention),
            DECODE: layer + 2 * attention,
            HEAD: layer,
            HEAD_TRAIN: 4 * layer,
            OPTIMIZER: 10 * self.tokens,
            GATHER: 0.0,
        }[self.op]

    @property
    def bytes(self) -> float:
        """Return the bytes of memory that it reads or writes."""
        weights = self.item * self.parameters
        widths = 6 * self.hidden + 2 * self.parameters / self.hidden + 2 * self.query
        states = self.item * self.tokens * widths
        logits = 4.0 * self.tokens * self.parameters / self.hidden
        cache = self.item * self.tokens * self.length * self.key_value
        return {
            FORWARD: weights + states,
            TRAIN: 3 * (weights + states),
            DECODE: weights + states + cache,
            HEAD: weights + 4 * logits,
            HEAD_TRAIN: 3 * weights + 12 * logits,
            OPTIMIZER: 40 * self.tokens,
            GATHER: 2 * self.tokens,
        }[self.op]


class CostPredictor(Protocol):
    """Predicts what pieces of work take on a device.

    Attributes:
        source: Which measurement it rests on, and how old that is.
    """

    source: str

    def seconds(self, work: OperatorWork) -> float:
        """Return the seconds of a piece of work."""
        ...
