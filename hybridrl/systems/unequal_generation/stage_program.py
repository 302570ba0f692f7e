"""The integer program of one order of devices and one division into micro-batches, and what is
known of its result before it is solved."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from hybridrl.systems.unequal_generation.generation_plan import GenerationPlan, GenerationStage
from hybridrl.systems.unequal_generation.generation_problem import (
    GenerationProblem,
    StageCosts,
    compute_stage_costs,
)


class IntegerProgram:
    """A program that finds the variables, from 0 up, for which ``goal @ x`` is least.

    Args:
        goal: Of each variable.
        most: Of each variable.
        integral: Which of them are whole numbers.
    """

    def __init__(
        self, goal: NDArray[np.float64], most: NDArray[np.float64], integral: NDArray[np.bool_]
    ) -> None:
        self._goal, self._integral = goal, integral
        self.least, self.most = np.zeros(len(goal)), most
        self._where: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self._low: list[float] = []
        self._high: list[float] = []

    def row(self, where: ArrayLike, values: ArrayLike, low: float, high: float) -> None:
        """Add the constraint ``low <= values @ x[where] <= high``."""
        places = np.asarray(where).ravel()
        self._where.append(places)
        self._values.append(np.broadcast_to(np.asarray(values, float), places.shape))
        self._low.append(low)
        self._high.append(high)

    def solve(
        self, *, below: float = np.inf, gap: float = 0.0, relaxed: bool = False
    ) -> tuple[float, NDArray[np.float64]] | None:
        """Return the least goal and its variables; None if there is no solution.

        Args:
            below: Only what is as low as this counts.
            gap: Share by which the goal may be above the least.
            relaxed: With fractions.
        """
        ends = np.cumsum([0, *map(len, self._where)])
        matrix = csr_array(
            (np.concatenate(self._values), np.concatenate(self._where), ends),
            shape=(len(ends) - 1, len(self._goal)),
        )
        # The solver knows what is 1 and what is 1e-7; seconds may be neither.
        scale = 1.0 / max(float(np.abs(self._goal).max()), 1e-30)
        constraints = [LinearConstraint(matrix, np.array(self._low), np.array(self._high))]
        if np.isfinite(below):
            constraints.append(LinearConstraint(self._goal * scale, -np.inf, below * scale))
        found = milp(
            self._goal * scale,
            integrality=None if relaxed else self._integral.astype(int),
            bounds=Bounds(self.least, self.most),
            constraints=constraints,
            options={"mip_rel_gap": gap},
        )
        return None if found.x is None else (float(found.fun) / scale, found.x)


class PipelineCandidate(NamedTuple):
    """A candidate pipeline: devices in an order, micro-batches of decode, and pieces of each in
    prefill."""

    order: tuple[int, ...]
    micro_batches: int
    pieces: int


class StageProgram:
    """An integer program that assigns layers and their bits to stages.

    Three bounds say more and more of the seconds that its best plan takes, at higher and higher
    costs: of layers that can be divided at will; of a program that knows how many layers of each
    precision a stage has, but not which; and of the program itself.

    Attributes:
        alike: The same for programs with the same bounds: between equal links it does not matter
            in which order the inner stages come, as long as layers need not be neighbours.
    """

    def __init__(self, problem: GenerationProblem, choice: PipelineCandidate) -> None:
        self.problem, self.choice = problem, choice
        self._bits = sorted(problem.layer_bytes)
        order, count, pieces = choice
        self._prefill = compute_stage_costs(problem, order, count * pieces, True)
        self._decode = compute_stage_costs(problem, order, count, False)
        self._goes_on = problem.response_tokens > 1
        self._constant = sum(self._prefill.fixed) + sum(self._prefill.link)
        self._fixed_decode = sum(self._decode.fixed) + sum(self._decode.link)
        self._constant += self._goes_on * self._fixed_decode
        inner = order[1:-1]
        if len({link for n in order for m, link in enumerate(problem.links[n]) if m != n}) == 1:
            inner = tuple(sorted(inner))
        self.alike = order[:1], inner, order[-1:], count, pieces

    def fluid_bound(self) -> float:
        """Return the lower bound for layers in the fastest precision that can be divided at
        will."""
        _, count, pieces = self.choice
        prefill, prefill_sum = self._flow(self._prefill)
        decode, decode_sum = self._flow(self._decode)
        seconds = prefill_sum + (count * pieces - 1) * prefill + self._constant
        if self._goes_on:
            rounds = max(count * decode, decode_sum + self._fixed_decode)
            later = (self.problem.response_tokens - 2) * rounds
            seconds += later + (count - 1) * decode + decode_sum
        return seconds

    def counted_bound(self, relaxed: bool) -> float | None:
        """Return the lower bound for layers that need not be neighbours; None if there is no plan.

        Args:
            relaxed: Of fractions of layers.
        """
        problem, stages, bits = self.problem, len(self.choice.order), len(self._bits)
        counts = np.arange(stages * bits).reshape(stages, bits)
        layers = counts.size + np.arange(problem.layers * bits).reshape(problem.layers, bits)
        integral = np.zeros(counts.size + layers.size, bool)
        integral[: counts.size] = True
        program = self._program(counts, counts.size + layers.size, integral)
        for layer in range(problem.layers):
            program.row(layers[layer], 1.0, 1.0, 1.0)
        for place in range(bits):
            where = np.concatenate([counts[:, place], layers[:, place]])
            signs = np.repeat([1.0, -1.0], [stages, problem.layers])
            program.row(where, signs, 0.0, 0.0)
        self._limit_kl(program, layers)
        found = program.solve(relaxed=relaxed)
        return None if found is None else found[0] + self._constant

    def solve(self, below: float, gap: float) -> GenerationPlan | None:
        """Return the best plan that takes less than `below` seconds; None if there is none.

        Args:
            gap: Share of the time by which it may be worse than the best.
        """
        problem, stages, bits = self.problem, len(self.choice.order), len(self._bits)
        size = problem.layers * stages * bits
        numbers = np.arange(size).reshape(problem.layers, stages, bits)
        counts = numbers.transpose(1, 2, 0)
        program = self._program(counts, size, np.ones(size, bool))
        for layer in range(problem.layers):
            program.row(numbers[layer], 1.0, 1.0, 1.0)
            for stage in range(stages - 1) if layer else ():
                # It is at a stage or before it only if the layer below is.
                where = np.stack([numbers[layer, : stage + 1], numbers[layer - 1, : stage + 1]])
                signs = np.repeat([1.0, -1.0], where[0].size)
                program.row(where, signs, -np.inf, 0.0)
        self._limit_kl(program, numbers)
        found = program.solve(below=below - self._constant, gap=gap)
        if found is None:
            return None
        chosen = found[1][:size].reshape(numbers.shape).round().astype(bool)
        plan = []
        for stage, device in enumerate(self.choice.order):
            _, places = np.nonzero(chosen[:, stage])
            plan.append(GenerationStage(device, tuple(self._bits[place] for place in places)))
        return GenerationPlan(tuple(plan), self.choice.micro_batches, self.choice.pieces)

    def _flow(self, costs: StageCosts) -> tuple[float, float]:
        """Return lower bounds of the slowest stage's seconds and of the seconds of all layers."""
        fastest = np.array([min(layer.values()) for layer in costs.layer])
        layers = self.problem.layers
        slowest = layers / np.sum(1.0 / fastest) if fastest.all() else 0.0
        return max(slowest, *costs.fixed, *costs.link), layers * fastest.min()

    def _program(
        self, counts: NDArray[np.int64], size: int, integral: NDArray[np.bool_]
    ) -> IntegerProgram:
        """Build the program: goal, times and memory.

        Args:
            counts: ``[stages, bits]`` or ``[stages, bits, layers]``: the variables whose sum is the
                number of layers of that precision on that stage.
            size: Number of all variables but those of time.
        """
        problem, (order, count, pieces) = self.problem, self.choice
        counts = counts.reshape(*counts.shape[:2], -1)
        slowest_prefill, slowest, rounds = size, size + 1, size + 2
        prefill, decode = self._times(self._prefill), self._times(self._decode)
        # `seconds_of`, without what does not depend on the variables.
        goal = np.zeros(size + 3)
        goal[counts] = (prefill + self._goes_on * decode)[:, :, None]
        goal[slowest_prefill] = count * pieces - 1
        goal[slowest] = (count - 1) * self._goes_on
        goal[rounds] = max(0, problem.response_tokens - 2)
        most = np.full(size + 3, np.inf)
        most[:size] = 1.0 if counts.shape[2] > 1 or problem.layers == 1 else problem.layers
        program = IntegerProgram(goal, most, np.append(integral, [False] * 3))
        program.least[slowest_prefill] = max(self._prefill.link)
        program.least[slowest] = max(self._decode.link)
        program.row([slowest, rounds], [count, -1.0], -np.inf, 0.0)
        every = np.broadcast_to(decode[:, :, None], counts.shape).ravel()
        where = np.append(counts.ravel(), rounds)
        program.row(where, np.append(every, -1.0), -np.inf, -self._fixed_decode)
        for stage, own in enumerate(counts):
            program.row(own, 1.0, 1.0, np.inf)
            for times, fixed, top in (
                (prefill, self._prefill.fixed, slowest_prefill),
                (decode, self._decode.fixed, slowest),
            ):
                values = np.broadcast_to(times[stage][:, None], own.shape).ravel()
                where = np.append(own.ravel(), top)
                program.row(where, np.append(values, -1.0), -np.inf, -fixed[stage])
            # In shares of the memory, because bytes are large numbers.
            memory = problem.devices[order[stage]].memory
            taken = problem.embedding_bytes if stage == 0 else 0.0
            taken += problem.head_bytes if stage == len(order) - 1 else 0.0
            sizes = np.array([problem.layer_bytes[b] for b in self._bits]) + problem.layer_cache
            shares = np.broadcast_to(sizes[:, None] / memory, own.shape)
            program.row(own, shares.ravel(), -np.inf, 1.0 - taken / memory)
        return program

    def _times(self, costs: StageCosts) -> NDArray[np.float64]:
        """Return the seconds of a layer, ``[stages, bits]``."""
        return np.array([[layer[bits] for bits in self._bits] for layer in costs.layer])

    def _limit_kl(self, program: IntegerProgram, layers: NDArray[np.int64]) -> None:
        """Add the limit of the sum of indicators.

        Args:
            layers: ``[layers, ..., bits]``: the variables of each layer.
        """
        nats = np.array([[one[bits] for bits in self._bits] for one in self.problem.indicators])
        if (scale := float(nats.max())) > 0:
            spread = np.broadcast_to(
                nats.reshape(len(nats), *[1] * (layers.ndim - 2), -1), layers.shape
            )
            limit = self.problem.max_kl / scale
            program.row(layers, spread.ravel() / scale, -np.inf, limit)
