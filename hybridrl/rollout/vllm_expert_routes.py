"""The experts that took each token while vLLM generated.

On GPUs vLLM says so itself (`enable_return_routed_experts`). Its runner for CPUs does not; there
the routers are watched, and what they chose in a step is put down to the requests of the step.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

from hybridrl.errors import RolloutError

ExpertRoutes = npt.NDArray[np.integer[Any]]
"""`[tokens, layers with experts, experts chosen]`, of all tokens of a sample but the last."""


def list_expert_layers(model: nn.Module) -> list[MoERunner]:
    """Return the layers of experts in the order of the model."""
    return [module for module in model.modules() if isinstance(module, MoERunner)]


def find_routes_dtype(model: nn.Module) -> npt.DTypeLike:
    """Return the smallest dtype that holds the number of every expert."""
    most = max(layer.routed_experts.global_num_experts for layer in list_expert_layers(model))
    return np.uint8 if most <= 256 else np.int16


def select_routes(model: nn.Module, routes: ExpertRoutes | None) -> ExpertRoutes:
    """Return the layers with experts of the routes that vLLM reports for a sample."""
    assert routes is not None
    found = routes[:, [layer.layer_id for layer in list_expert_layers(model)]]
    return found.astype(find_routes_dtype(model))


def find_sample(engine: Any, name: str) -> tuple[str, int]:
    """Return request and number of a sample from the engine's own name of it."""
    state = engine.output_processor.request_states[name]
    if (parent := state.parent_req) is None:
        return state.external_req_id, 0
    return parent.external_req_id, int(name.split("_", 1)[0])  # the name begins with the number


class RouteRecorder:
    """A recorder of the routers' choices, for an engine that takes no tokens from a cache.

    Args:
        engine: vLLM's, in this process.
        worker: Its worker.
    """

    def __init__(self, engine: Any, worker: Any) -> None:
        self._engine = engine
        self._runner = worker.model_runner
        self._layers = list_expert_layers(worker.get_model())
        self._dtype = find_routes_dtype(worker.get_model())
        self._step: dict[int, Tensor] = {}
        self._of_samples: dict[tuple[str, int], list[ExpertRoutes]] = {}
        for number, layer in enumerate(self._layers):
            layer.router.set_capture_fn(partial(self._step.__setitem__, number))
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._watched

    def take(self, request: str, number: int, tokens: int) -> ExpertRoutes:
        """Return the routes of a finished sample and drop them here.

        Args:
            request: The name under which its prompt was given to the engine.
            number: Of the sample, among those of the prompt.
            tokens: So many, the first.
        """
        return np.concatenate(self._of_samples.pop((request, number)))[:tokens]

    def forget(self, requests: Collection[str]) -> None:
        """Drop all samples of these requests, by the names of their prompts."""
        for request, number in list(self._of_samples):
            if request in requests:
                del self._of_samples[request, number]

    def _watched(self, scheduled: Any, *args: Any, **options: Any) -> Any:
        self._step.clear()
        outcome = self._execute(scheduled, *args, **options)
        if scheduled.total_num_scheduled_tokens:
            self._note(scheduled.num_scheduled_tokens)
        return outcome

    def _note(self, tokens: dict[str, int]) -> None:
        """Assign a step's tokens, which lie in the runner's order, to their requests."""
        batch, at = self._runner.input_batch, 0
        chosen = np.stack([self._step[n].numpy() for n in range(len(self._layers))], axis=1)
        for place, name in enumerate(batch.req_ids):
            count = tokens[name]
            held = self._of_samples.setdefault(find_sample(self._engine, name), [])
            before = int(batch.num_computed_tokens_cpu[place])
            known = sum(map(len, held))
            if before > known:
                raise RolloutError(
                    f"Of a sample {before - known} tokens were not computed but taken from a "
                    "cache, so nobody knows which experts took them. With "
                    "rollout.routing_replay=true leave enable_prefix_caching out of "
                    "rollout.engine_options, on CPUs."
                )
            if before < known:  # it begins anew after it had given its memory to others, or tokens
                held[:] = [np.concatenate(held)[:before]]  # that were guessed ahead were wrong
            held.append(chosen[at : at + count].astype(self._dtype))
            at += count
