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


def find_request_name(engine: Any, name: str) -> str:
    """Return the name under which a request was given to vLLM from vLLM's own name of it."""
    return str(engine.output_processor.request_states[name].external_req_id)


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
        self._of_requests: dict[str, list[ExpertRoutes]] = {}
        for number, layer in enumerate(self._layers):
            layer.router.set_capture_fn(partial(self._step.__setitem__, number))
        self._execute = self._runner.execute_model
        self._runner.execute_model = self._watched

    def take(self, request: str, tokens: int) -> ExpertRoutes:
        """Return the routes of the first tokens of a finished request, and drop it here."""
        return np.concatenate(self._of_requests.pop(request))[:tokens]

    def forget(self, requests: Collection[str]) -> None:
        """Drop these requests."""
        for request in requests:
            self._of_requests.pop(request, None)

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
            held = self._of_requests.setdefault(find_request_name(self._engine, name), [])
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
