"""Tensor parallelism: every matrix cut over the ranks of a group (Shoeybi et al. 2019,
arXiv:1909.08053), by the plan that transformers models carry.

The parameters stay plain tensors, smaller ones, so FSDP, the optimizer and the packed forward treat
them as any others. Between two layers activations are alike on every rank; inside attention and MLP
each rank has its own heads and columns, of every expert where there are several. The vocabulary is
cut as well.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import decoder_of
from hybridrl.models.log_probs import VocabularyShard
from hybridrl.models.packed_models import CausalPolicy, PackedModel
from hybridrl.parallel.collectives import copy_to_region, reduce_from_region
from hybridrl.parallel.process_group import ParallelMesh

_EXPERTS_STYLE, _PACKED_STYLE = "moe_tp_experts", "packed_colwise"
"""A module that holds all experts of a layer, and in it the parameter that holds two matrices of
every expert one after the other."""
_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce", _EXPERTS_STYLE, _PACKED_STYLE)
"""What a plan may say of a module or, of experts, a parameter."""
_TIED_EMBEDDING_STYLE = "embedding_rowwise"
"""What it says of a tied embedding, which is cut along the vocabulary here, as untied ones are."""
_EXPERT_ALIGNMENT = 8
"""Columns of an expert: torch's grouped matrix product wants rows of whole 16 bytes."""
_KEY_VALUE_MODULES = ("k_proj", "v_proj")


@dataclass(frozen=True)
class ParameterCut:
    """The split of a parameter over the ranks of a tensor-parallel group.

    Attributes:
        shape: Of the whole parameter.
        dim: The one that is cut.
        bounds: By rank, the ranges [start, stop) on `dim` that it holds one after the other: one,
            or of two matrices in one parameter a range of each. Key and value heads are on several
            ranks where there are fewer of them than ranks.
    """

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[tuple[tuple[int, int], ...], ...]

    def copies(self) -> int:
        """Return the number of ranks that hold the same elements."""
        return len(self.bounds) // len(set(self.bounds))

    def of(self, whole: Tensor, index: int) -> Tensor:
        """Return the part of `whole` that rank `index` holds."""
        parts = [whole.narrow(self.dim, at, stop - at) for at, stop in self.bounds[index]]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@dataclass
class TensorParallelCuts:
    """The result of `apply_tensor_parallel`: the cut of each parameter, and those with partial
    gradients.

    Attributes:
        cuts: By name of parameter; those not named are whole on every rank.
        partial: Names of parameters whose gradient is to be summed over the ranks that hold the
            same elements: each has used them for heads of its own.
    """

    cuts: dict[str, ParameterCut]
    partial: list[str]

    def keep_part(
        self, module: nn.Module, leaf: str, name: str, cut: ParameterCut, rank: int
    ) -> None:
        """Replace a parameter of `module`, called `name` in the model, by the part of a rank."""
        whole = getattr(module, leaf)
        part = cut.of(whole.detach(), rank).clone()
        setattr(module, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
        self.cuts[f"{name}.{leaf}"] = cut


def check_tensor_parallel_heads(config: PretrainedConfig, size: int, path: str) -> None:
    """Check that the heads and experts of a model can be split into `size` parts."""
    if size == 1:
        return
    config = config.get_text_config()
    heads = config.num_attention_heads
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    if heads % size:
        raise ConfigError(
            f"actor.parallel.tp={size} does not divide the {heads} attention heads of {path}. "
            f"Set it to a divisor of {heads}."
        )
    if key_value_heads % size and size % key_value_heads:
        raise ConfigError(
            f"actor.parallel.tp={size} neither divides the {key_value_heads} key-value heads of "
            f"{path} nor is divided by them, so ranks would share parts of heads."
        )
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or set(plan.values()) - {*_STYLES, _TIED_EMBEDDING_STYLE}:
        raise ConfigError(
            f"actor.parallel.tp={size}: transformers has no plan of {', '.join(_STYLES[:2])} "
            f"layers for {config.model_type} models ({path}). Set actor.parallel.tp=1."
        )
    if _EXPERTS_STYLE in plan.values():
        width = getattr(config, "moe_intermediate_size", None) or config.intermediate_size
        if width % (size * _EXPERT_ALIGNMENT):
            raise ConfigError(
                f"actor.parallel.tp={size}: the experts of {path} are {width} wide, and kernels "
                f"need a multiple of {_EXPERT_ALIGNMENT} on each device. Set it to a divisor of "
                f"{width // _EXPERT_ALIGNMENT}."
            )


def apply_tensor_parallel(model: PackedModel, mesh: ParallelMesh) -> TensorParallelCuts:
    """Keep this rank's part of every parameter, in place, and add the sums over the group that the
    model's forward needs."""
    group, size, rank = mesh.group("tp"), mesh.size("tp"), mesh.index("tp")
    done = TensorParallelCuts({}, [])
    if group is None:
        return done
    inner = model.inner
    config = inner.config.get_text_config()
    key_value_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shared = max(1, size // key_value_heads)
    names = {module: name for name, module in inner.named_modules()}
    base = decoder_of(inner)
    parents: dict[nn.Module, None] = {}  # of what is cut in columns
    for path, module in base.named_modules():
        style = _style(config.base_model_tp_plan, path)
        if style is None:
            continue
        if style == "colwise":
            parents[base.get_submodule(path.rpartition(".")[0])] = None
        name = names[module]
        if style == _EXPERTS_STYLE:
            _cut_experts(module, path, name, config.base_model_tp_plan, mesh, done)
            continue
        if style == "replicated_with_grad_allreduce":
            done.partial += [f"{name}.{leaf}" for leaf, _ in module.named_parameters()]
            continue
        is_shared = shared > 1 and path.endswith(_KEY_VALUE_MODULES)
        parts = size // shared if is_shared else size
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            if style == "rowwise" and leaf == "bias":
                continue
            found = _even_cut(tuple(parameter.shape), 0 if style == "colwise" else 1, size, parts)
            done.keep_part(module, leaf, name, found, rank)
            if is_shared:
                done.partial.append(f"{name}.{leaf}")
        if style == "rowwise":
            _sum_output(module, group)
    for parent in parents:
        parent.register_forward_pre_hook(_copy_input(group), with_kwargs=True)
    _cut_vocabulary(model, group, rank, size, names, done)
    return done


def _style(plan: dict[str, str], path: str) -> str | None:
    found = (style for pattern, style in plan.items() if fnmatch.fnmatch(path, pattern))
    return next((style for style in found if style != _TIED_EMBEDDING_STYLE), None)


def _even_cut(
    shape: tuple[int, ...], dim: int, size: int, parts: int, matrices: int = 1
) -> ParameterCut:
    """Return the cut of matrices that lie one after the other, each into `parts`; neighbouring
    ranks share a part where there are more ranks than parts."""
    length = shape[dim] // matrices
    step = -(-length // parts)
    edges = [min(step * part, length) for part in range(parts + 1)]
    index = [rank * parts // size for rank in range(size)]
    firsts = range(0, shape[dim], length)
    return ParameterCut(
        shape, dim, tuple(tuple((at + edges[i], at + edges[i + 1]) for at in firsts) for i in index)
    )


def _cut_experts(
    experts: nn.Module,
    path: str,
    name: str,
    plan: dict[str, str],
    mesh: ParallelMesh,
    done: TensorParallelCuts,
) -> None:
    """Split every expert of a layer as an MLP is split. Their outputs are weighted and summed on
    each rank before the one sum over ranks, so that the gradient of the router's weights, which all
    ranks have, is a sum as well."""
    group, size, rank = mesh.group("tp"), mesh.size("tp"), mesh.index("tp")
    for leaf, parameter in list(experts.named_parameters(recurse=False)):
        style, shape = _style(plan, f"{path}.{leaf}"), tuple(parameter.shape)
        if style not in (_PACKED_STYLE, "rowwise") or getattr(experts, "is_transposed", False):
            raise ConfigError(
                f"actor.parallel.tp={size}: the experts of {type(experts).__name__} keep `{leaf}` "
                "in a form that cannot be cut here. Set actor.parallel.tp=1."
            )
        if style == _PACKED_STYLE:
            found = _even_cut(shape, len(shape) - 2, size, size, matrices=2)
        else:
            found = _even_cut(shape, len(shape) - 1, size, size)
        done.keep_part(experts, leaf, name, found, rank)

    def copy_inputs(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_states, top_k_index, top_k_weights = args
        return (
            copy_to_region(hidden_states, group),
            top_k_index,
            copy_to_region(top_k_weights, group),
        )

    experts.register_forward_pre_hook(copy_inputs)
    experts.register_forward_hook(lambda _, __, output: reduce_from_region(output, group))


def _copy_input(group: dist.ProcessGroup) -> Any:
    """Return a hook that copies the input of attention or MLP to the region: activations are equal
    on all ranks, and each rank's heads or columns contribute to their gradient."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (copy_to_region(args[0], group), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": copy_to_region(kwargs["hidden_states"], group)}

    return hook


def _sum_output(linear: nn.Linear, group: dist.ProcessGroup) -> None:
    def forward(x: Tensor) -> Tensor:
        found = reduce_from_region(F.linear(x, linear.weight), group)
        return found if linear.bias is None else found + linear.bias

    linear.forward = forward  # type: ignore[method-assign]


def _cut_vocabulary(
    model: PackedModel,
    group: dist.ProcessGroup,
    rank: int,
    size: int,
    names: dict[nn.Module, str],
    done: TensorParallelCuts,
) -> None:
    """Split the embedding and the output embedding of a language model along the vocabulary."""
    embedding, head = model.inner.get_input_embeddings(), model.inner.get_output_embeddings()
    found = _even_cut(tuple(embedding.weight.shape), 0, size, size)
    ((start, stop),) = found.bounds[rank]
    tied = head is not None and head.weight is embedding.weight
    done.keep_part(embedding, "weight", names[embedding], found, rank)

    padding = embedding.padding_idx  # its vector gets no gradient
    if padding is not None:
        padding = padding - start if start <= padding < stop else None

    def embed(ids: Tensor) -> Tensor:
        mine = (ids >= start) & (ids < stop)
        vectors = F.embedding(torch.where(mine, ids - start, 0), embedding.weight, padding)
        return reduce_from_region(vectors * mine[..., None], group)

    embedding.forward = embed
    if isinstance(model, CausalPolicy):
        if tied:
            head.weight = embedding.weight
        else:
            done.keep_part(head, "weight", names[head], found, rank)
        model.vocabulary = VocabularyShard(start, group)
