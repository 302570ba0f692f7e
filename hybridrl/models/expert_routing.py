"""The routers of mixture-of-experts models: counted, balanced, and made to repeat choices.

A router gives a token its logits over a layer's experts, the experts that it chose, and their
weights. Hooks on transformers' routers see these and, where that is asked for, change them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import build_meta_language_model, decoder_of
from hybridrl.models.packed_samples import PackingMetadata


@dataclass(frozen=True)
class _LayerRouting:
    """The inputs of a layer's router besides hidden states. All are tensors of their own: a graph
    that is compiled for one layer then serves all of them, while views of a larger tensor would be
    guarded by their offset.

    Attributes:
        routes: int64 `[tokens, chosen]`: the experts that are to take each token; see
            `PackingMetadata`.
        counted: `[2, experts]`: where choices and probabilities are added; None: not counted.
        penalties: `[experts]`: see `compute_router_penalties`; None: no balancing loss.
        real: See `PackingMetadata`.
    """

    routes: Tensor | None
    counted: Tensor | None
    penalties: Tensor | None
    real: Tensor | None


class ExpertRouters:
    """The routers of a model in the order of its layers, with hooks that count, balance and replay.

    The balancing loss is that of Fedus et al. 2021 (Switch Transformers, arXiv:2101.03961, eq. 4 to
    6), averaged over layers: with f_i the share of choices that fall on expert i, P_i the mean of
    its probability, both over all tokens of the global mini-batch, and E experts, ``weight * E *
    sum_i f_i P_i``; 1 times the weight if all are chosen alike. f_i has no gradient. It is counted
    before (`compute_router_penalties`), so that the loss is a sum over tokens and does not depend
    on how these are divided into micro-batches and ranks.

    Args:
        model: Its routers get hooks. It may be cut afterwards, and parts of it may go.
        routers: Those, by name.

    Attributes:
        layers, experts, chosen: Layers that have routers, experts in each, and how many of these
            take a token.
    """

    def __init__(self, model: PreTrainedModel, routers: dict[str, nn.Module]) -> None:
        config = model.config.get_text_config()
        self.layers = len(routers)
        self.experts = int(config.num_experts)
        self.chosen = int(config.num_experts_per_tok)
        self._normalises = detect_normalized_weights(next(iter(routers.values())), config)
        self._counted: list[Tensor] | None = None
        self._penalties: list[Tensor] | None = None
        self._layer: _LayerRouting | None = None
        kinds = set(model._no_split_modules or ())
        for number, (name, router) in enumerate(routers.items()):
            router.register_forward_hook(self._route)
            layer = _layer_of(model, name, kinds)
            layer.register_forward_pre_hook(partial(self._begin_layer, number), with_kwargs=True)

    @classmethod
    def of(cls, model: PreTrainedModel) -> ExpertRouters | None:
        """Return the routers of a model; None if it has none whose arithmetic is known here."""
        routers = find_routers(model)
        config = model.config.get_text_config()
        if not routers or detect_normalized_weights(next(iter(routers.values())), config) is None:
            return None
        return cls(model, routers)

    def count(self, device: torch.device) -> None:
        """Start to count from zero."""
        of_layer = partial(torch.zeros, 2, self.experts, dtype=torch.float64, device=device)
        self._counted = [of_layer() for _ in range(self.layers)]

    def counted(self) -> Tensor:
        """Return how often each expert was chosen since `count`, and the sum of its
        probabilities, over this rank's tokens and in its layers, `[2, layers, experts]`."""
        assert self._counted is not None
        found, self._counted = self._counted, None
        return torch.stack(found, 1)

    def keep_balance(self, penalties: Tensor | None) -> None:
        """Add the balancing loss in every forward from now on; None stops it."""
        self._penalties = None if penalties is None else [one.clone() for one in penalties]

    def _begin_layer(
        self, number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> None:
        # Before every run of a layer: with gradient checkpointing it runs again in the backward,
        # when the last forward may have been one of other samples.
        packing: PackingMetadata = kwargs["packing"]
        first = number * self.chosen
        routes = packing.routes
        self._layer = _LayerRouting(
            None if routes is None else routes[:, first : first + self.chosen].long(),
            None if self._counted is None or _is_backward() else self._counted[number],
            None if self._penalties is None else self._penalties[number],
            packing.real,
        )

    def _route(
        self, router: nn.Module, args: Any, output: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Count, replay and balance the output of a router. Compiled with its layer."""
        logits, scores, chosen = output
        layer = self._layer
        assert layer is not None
        if layer.routes is not None:
            chosen = torch.where(layer.routes < 0, chosen, layer.routes)
            scores = _scores(logits, chosen, bool(self._normalises)).to(scores.dtype)
        if layer.counted is not None:
            _add_counts(layer.counted, logits, chosen, layer.real)
        if layer.penalties is not None and torch.is_grad_enabled():
            by_token = logits.float().softmax(-1) @ layer.penalties
            if layer.real is not None:  # else it is of samples, all of it
                by_token = by_token * layer.real
            scores = _WithLoss.apply(scores, by_token.sum())
        return logits, scores, chosen


@torch.no_grad()
def _add_counts(into: Tensor, logits: Tensor, chosen: Tensor, real: Tensor | None) -> None:
    counts = logits.new_ones(len(logits), dtype=torch.float64) if real is None else real.double()
    repeated = counts[:, None].expand_as(chosen).flatten()
    # Neither a selection nor `bincount`, for which a device would have to be waited for.
    into[0].scatter_add_(0, chosen.flatten().long(), repeated)
    into[1] += counts @ logits.float().softmax(-1).double()


def find_routers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Return the routers that transformers knows of in a model, by name."""
    recorded = getattr(decoder_of(model), "_can_record_outputs", None) or {}
    kind = getattr(recorded.get("router_logits"), "target_class", None)
    if kind is None:
        return {}
    return {name: module for name, module in model.named_modules() if type(module) is kind}


def detect_normalized_weights(router: nn.Module, config: PretrainedConfig) -> bool | None:
    """Return whether the chosen experts' weights add up to 1, by trial; None if they are no softmax
    over the experts in either way."""
    with torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.manual_seed(0)
        try:
            twin = type(router)(config)
            for parameter in twin.parameters():
                parameter.normal_()
            logits, scores, chosen = twin(torch.randn(5, config.hidden_size))
            found = {way: _scores(logits, chosen, way) for way in (True, False)}
            near = (way for way, values in found.items() if torch.allclose(values, scores.float()))
        except Exception:  # of whatever kind: it is made and answers in another way
            return None
        return next(near, None)


def check_routers(config: PretrainedConfig, setting: str, path: str) -> None:
    """Refuse a setting that needs routers, for a model without any that are known here.

    Raises:
        ConfigError: names the setting.
    """
    model = build_meta_language_model(config)
    if ExpertRouters.of(model) is None:
        raise ConfigError(
            f"{setting}: {path} has no routers that choose experts by a softmax over all of a "
            "layer, as Qwen3-MoE, Qwen2-MoE, Mixtral and OLMoE have them. Leave the setting out."
        )


def compute_router_metrics(counted: Tensor, chosen: int) -> dict[str, float]:
    """Compute the metrics of an update's routing.

    Args:
        counted: As `ExpertRouters.counted`, of all tokens of the mini-batch.
        chosen: Experts that take a token.

    Returns:
        `router_busiest`: the largest share of a layer's choices that falls on one expert, of all
        layers; `router_entropy`: that of the choices, 1 if all experts are chosen alike, the mean
        of the layers; `router_loss`: see `ExpertRouters`, without its weight.
    """
    counts, probabilities = counted.cpu()
    load = counts / counts.sum(1, keepdim=True).clamp(min=1.0)
    mean = probabilities / (counts.sum(1, keepdim=True) / chosen).clamp(min=1.0)
    experts = counts.shape[1]
    entropy = torch.special.entr(load).sum(1) / math.log(max(2, experts))
    return {
        "router_busiest": float(load.max()),
        "router_entropy": float(entropy.mean()),
        "router_loss": float(experts * (load * mean).sum(1).mean()),
    }


def compute_router_penalties(counted: Tensor, chosen: int, weight: float) -> Tensor:
    """Compute what the balancing loss adds for a token, for each unit of probability that its
    router gives an expert, from the counts of a mini-batch.

    Returns:
        `[layers, experts]`, float32.
    """
    counts = counted[0]
    choices = counts.sum(1, keepdim=True).clamp(min=1.0)
    tokens = choices.max() / chosen
    layers, experts = counts.shape
    return (counts / choices * (weight * experts / layers) / tokens).float()


def _layer_of(model: PreTrainedModel, name: str, kinds: set[str]) -> nn.Module:
    """Return the decoder layer that a router is in."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        layer = model.get_submodule(".".join(parts[:end]))
        if type(layer).__name__ in kinds:
            return layer
    raise ConfigError(f"The router {name} is in no decoder layer of {type(model).__name__}.")


def _scores(logits: Tensor, chosen: Tensor, normalise: bool) -> Tensor:
    found = logits.float().softmax(-1).gather(1, chosen.long())
    return found / found.sum(-1, keepdim=True) if normalise else found


def _is_backward() -> bool:
    """Return whether a backward is under way; a forward is then one of gradient checkpointing."""
    return torch._C._current_graph_task_id() != -1


class _WithLoss(torch.autograd.Function):
    """An autograd function that adds a loss to whatever loss is taken of `values`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)
