"""What transformers' plan for tensor parallelism cuts of a model, by the paths of its modules.

Who cuts a model (`parallel.tensor_parallel`) and who counts what a rank's part of it takes
(`model_shape`) read it here, so that both agree on which ranks have tokens of their own.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

EXPERTS_STYLE = "moe_tp_experts"
"""The style of a module that holds all experts of a layer."""
TIED_EMBEDDING_STYLE = "embedding_rowwise"
"""Marks an input embedding that is the output's as well, which is cut as the output."""


@dataclass(frozen=True)
class TensorPlan:
    """The modules that a plan cuts.

    Attributes:
        styles: How a module is cut, by its path in the decoder.
        mixtures: Paths of the parts of layers that hold a router and its experts.
        parents: Paths of the modules whose first products are cut by columns, in order.
        regions: Paths of attention, MLPs and mixtures: within them a rank has all tokens.
    """

    styles: dict[str, str]
    mixtures: set[str]
    parents: list[str]
    regions: set[str]

    def cuts_whole_layers(self, decoder: nn.Module) -> bool:
        """Return whether every part of the layers but norms is cut. Only then may each rank have
        its own part of the tokens between the parts: what is left whole, as attention with latent
        keys, would see those alone."""
        stacks = {_parent_path(_parent_path(path)) for path in self.regions}
        parts = {
            f"{stack}.{layer}.{part}"
            for stack in stacks
            for layer, of in decoder.get_submodule(stack).named_children()
            for part, module in of.named_children()
            if any(module.children())
        }
        return bool(parts) and parts == self.regions


def read_tensor_plan(decoder: nn.Module, plan: Mapping[str, str]) -> TensorPlan:
    """Find the modules of a decoder that a plan of patterns (`base_model_tp_plan`) cuts."""
    styles = {
        path: style for path, _ in decoder.named_modules() if (style := plan_style(plan, path))
    }
    mixtures = {_parent_path(path) for path, style in styles.items() if style == EXPERTS_STYLE}
    parents = dict.fromkeys(
        _parent_path(path) for path, style in styles.items() if style == "colwise"
    )
    regions = {path for path in parents if not lies_in(path, mixtures)} | mixtures
    return TensorPlan(styles, mixtures, list(parents), regions)


def plan_style(plan: Mapping[str, str], path: str) -> str | None:
    """Return how a plan cuts the module or parameter of this path; None where it does not."""
    found = (style for pattern, style in plan.items() if fnmatch.fnmatch(path, pattern))
    return next((style for style in found if style != TIED_EMBEDDING_STYLE), None)


def _parent_path(path: str) -> str:
    """Return the path of the module that holds this one."""
    return path.rpartition(".")[0]


def lies_in(path: str, modules: Iterable[str]) -> bool:
    """Return whether a path is one of these modules, or of something within them."""
    return any(path == module or path.startswith(f"{module}.") for module in modules)


def change_input_states(change: Callable[[Tensor], Tensor]) -> Any:
    """Return a hook that changes the states that attention, an MLP or a mixture gets."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (change(args[0]), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": change(kwargs["hidden_states"])}

    return hook


def change_output_states(change: Callable[[Tensor], Tensor]) -> Any:
    """Return a hook that changes the states that a module gives, alone or first of several."""

    def hook(_: nn.Module, __: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return change(output[0]), *output[1:]
        return change(output)

    return hook
