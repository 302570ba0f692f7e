"""Tensor parallelism: every matrix cut over the ranks of a group (Shoeybi et al. 2019,
arXiv:1909.08053), by the plan that transformers models carry.

The parameters stay plain tensors, smaller ones, so FSDP, the optimizer and the packed forward treat
them as any others. Inside attention and MLP each rank has its own heads and columns, of every
expert where there are several. Between them it has the states of its own part of the tokens
(Korthikanti et al. 2022, arXiv:2205.05198) where no other axis cuts model or tokens, else of all.
The vocabulary is cut as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import decoder_of
from hybridrl.models.linear_map import TensorMap
from hybridrl.models.log_probs import VocabularyShard
from hybridrl.models.packed_models import CausalPolicy, PackedModel
from hybridrl.models.packed_samples import SampleLayout
from hybridrl.models.tensor_plan import (
    EXPERTS_STYLE,
    TIED_EMBEDDING_STYLE,
    TensorPlan,
    change_input_states,
    change_output_states,
    lies_in,
    plan_style,
    read_tensor_plan,
)
from hybridrl.parallel.collectives import (
    copy_to_region,
    gather_tokens,
    reduce_from_region,
    split_tokens,
)
from hybridrl.parallel.process_group import ParallelMesh

_PACKED_STYLE = "packed_colwise"
"""What a plan says of a parameter that holds two matrices of every expert one after the other."""
_STYLES = ("colwise", "rowwise", "replicated_with_grad_allreduce", EXPERTS_STYLE, _PACKED_STYLE)
"""What a plan may say of a module or, of experts, a parameter."""
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
        rank: This one's place.
    """

    shape: tuple[int, ...]
    dim: int
    bounds: tuple[tuple[tuple[int, int], ...], ...]
    rank: int

    @property
    def mine(self) -> tuple[tuple[int, int], ...]:
        """The ranges that this rank holds."""
        return self.bounds[self.rank]

    def copies(self) -> int:
        """Return the number of ranks that hold the same elements."""
        return len(self.bounds) // len(set(self.bounds))

    def of(self, whole: Tensor) -> Tensor:
        """Return the part of `whole` that this rank holds."""
        parts = [whole.narrow(self.dim, at, stop - at) for at, stop in self.mine]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


class TensorParallelCuts:
    """The result of `apply_tensor_parallel`: the cut of each parameter, and those with partial
    gradients.

    Args:
        model: That is cut.
        mesh: Its axis `tp` has the ranks.

    Attributes:
        cuts: By name of parameter; those not named are whole on every rank.
        partial: Names of parameters whose gradient is to be summed over the ranks that hold the
            same elements: each has used them for heads of its own.
    """

    def __init__(self, model: PackedModel, mesh: ParallelMesh) -> None:
        self.group, self.size, self.rank = mesh.group("tp"), mesh.size("tp"), mesh.index("tp")
        self.names = {module: name for name, module in model.inner.named_modules()}
        self.cuts: dict[str, ParameterCut] = {}
        self.partial: list[str] = []

    def keep_part(
        self, module: nn.Module, leaf: str, dim: int, parts: int, matrices: int = 1
    ) -> ParameterCut:
        """Replace a parameter of `module` by this rank's part.

        Args:
            parts: Into which each matrix is cut along `dim`; neighbouring ranks share a part where
                there are more ranks than parts.
            matrices: That lie one after the other along `dim`.
        """
        whole = getattr(module, leaf)
        shape = tuple(whole.shape)
        length = shape[dim] // matrices
        step = -(-length // parts)
        edges = [min(step * part, length) for part in range(parts + 1)]
        index = [rank * parts // self.size for rank in range(self.size)]
        firsts = range(0, shape[dim], length)
        bounds = tuple(tuple((at + edges[i], at + edges[i + 1]) for at in firsts) for i in index)
        cut = ParameterCut(shape, dim, bounds, self.rank)
        part = cut.of(whole.detach()).clone()
        setattr(module, leaf, nn.Parameter(part, requires_grad=whole.requires_grad))
        self.cuts[f"{self.names[module]}.{leaf}"] = cut
        return cut

    def add_partial(self, module: nn.Module, leaves: Iterable[str]) -> None:
        """Note parameters of `module` as ones with partial gradients."""
        self.partial += [f"{self.names[module]}.{leaf}" for leaf in leaves]


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
    if not plan or set(plan.values()) - {*_STYLES, TIED_EMBEDDING_STYLE}:
        raise ConfigError(
            f"actor.parallel.tp={size}: transformers has no plan of {', '.join(_STYLES[:2])} "
            f"layers for {config.model_type} models ({path}). Set actor.parallel.tp=1."
        )
    if EXPERTS_STYLE in plan.values():
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
    done = TensorParallelCuts(model, mesh)
    group, size = done.group, done.size
    if group is None:
        return done
    config = model.inner.config.get_text_config()
    key_value_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    shared = max(1, size // key_value_heads)
    base, plan = decoder_of(model.inner), config.base_model_tp_plan
    cuts = read_tensor_plan(base, plan)
    mixtures = cuts.mixtures
    copy, add = partial(copy_to_region, group=group), partial(reduce_from_region, group=group)
    enter, leave = copy, add
    if splits := _may_split_tokens(model, mesh, cuts):
        enter = partial(gather_tokens, group=group, summed=True)
        leave = partial(split_tokens, group=group, summed=True)
    for path, style in cuts.styles.items():
        module = base.get_submodule(path)
        if style == EXPERTS_STYLE:
            _cut_experts(module, path, plan, done)
            continue
        if style == "replicated_with_grad_allreduce":
            done.add_partial(module, (leaf for leaf, _ in module.named_parameters()))
            continue
        is_shared = shared > 1 and path.endswith(_KEY_VALUE_MODULES)
        parts = size // shared if is_shared else size
        for leaf, _ in list(module.named_parameters(recurse=False)):
            if style == "rowwise" and leaf == "bias":
                done.add_partial(module, [leaf] if splits and not lies_in(path, mixtures) else [])
                continue
            done.keep_part(module, leaf, 0 if style == "colwise" else 1, parts)
            if is_shared:
                done.add_partial(module, [leaf])
        if style == "rowwise":
            _sum_output(module, add if lies_in(path, mixtures) else leave)
    for path in cuts.parents:
        hook = change_input_states(copy if lies_in(path, mixtures) else enter)
        base.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    if splits:
        _split_tokens_between(model, cuts, done)
    _cut_vocabulary(model, done, leave)
    return done


def _may_split_tokens(model: PackedModel, mesh: ParallelMesh, cuts: TensorPlan) -> bool:
    """Return whether each rank has its own part of the tokens between attention and MLPs: where no
    other axis cuts model or tokens, and the plan cuts whole layers."""
    alone = mesh.size("pp") * mesh.size("ring", "ulysses") == 1
    packed = model.rows is SampleLayout.PACKED
    return alone and packed and cuts.cuts_whole_layers(decoder_of(model.inner))


def _split_tokens_between(model: PackedModel, cuts: TensorPlan, done: TensorParallelCuts) -> None:
    """Add the gathers and splits of tokens that a model needs besides those of attention and dense
    MLPs, and mark the parameters that each rank uses for its own tokens."""
    base = decoder_of(model.inner)
    gather = partial(gather_tokens, group=done.group, summed=False)
    split = partial(split_tokens, group=done.group, summed=False)

    def gather_output(_: nn.Module, __: Any, output: Any) -> Any:
        output.last_hidden_state = gather(output.last_hidden_state)
        return output

    for path in cuts.mixtures:  # whose routers look at all tokens
        module = base.get_submodule(path)
        module.register_forward_pre_hook(change_input_states(gather), with_kwargs=True)
        module.register_forward_hook(change_output_states(split))
    base.register_forward_hook(gather_output)
    model.multiple = done.size
    for path, module in base.named_modules():
        if not lies_in(path, cuts.regions) and module is not model.inner.get_input_embeddings():
            done.add_partial(module, (leaf for leaf, _ in module.named_parameters(recurse=False)))
    done.partial = list(dict.fromkeys(done.partial))


def _cut_experts(
    experts: nn.Module, path: str, plan: Mapping[str, str], done: TensorParallelCuts
) -> None:
    """Split every expert of a layer as an MLP is split. Their outputs are weighted and summed on
    each rank before the one sum over ranks, so that the gradient of the router's weights, which all
    ranks have, is a sum as well."""
    group, size = done.group, done.size
    for leaf, parameter in list(experts.named_parameters(recurse=False)):
        style = plan_style(plan, f"{path}.{leaf}")
        if style not in (_PACKED_STYLE, "rowwise") or getattr(experts, "is_transposed", False):
            raise ConfigError(
                f"actor.parallel.tp={size}: the experts of {type(experts).__name__} keep `{leaf}` "
                "in a form that cannot be cut here. Set actor.parallel.tp=1."
            )
        if style == _PACKED_STYLE:
            done.keep_part(experts, leaf, parameter.ndim - 2, size, matrices=2)
        else:
            done.keep_part(experts, leaf, parameter.ndim - 1, size)

    def copy_inputs(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden_states, top_k_index, top_k_weights = args
        return (
            copy_to_region(hidden_states, group),
            top_k_index,
            copy_to_region(top_k_weights, group),
        )

    experts.register_forward_pre_hook(copy_inputs)
    experts.register_forward_hook(lambda _, __, output: reduce_from_region(output, group))


def _sum_output(linear: nn.Linear, leave: TensorMap) -> None:
    def forward(x: Tensor) -> Tensor:
        found = leave(F.linear(x, linear.weight))
        return found if linear.bias is None else found + linear.bias

    linear.forward = forward  # type: ignore[method-assign]


def _cut_vocabulary(model: PackedModel, done: TensorParallelCuts, leave: TensorMap) -> None:
    """Split the embedding and the output embedding of a language model along the vocabulary."""
    embedding, head = model.inner.get_input_embeddings(), model.inner.get_output_embeddings()
    tied = head is not None and head.weight is embedding.weight
    ((start, stop),) = done.keep_part(embedding, "weight", 0, done.size).mine

    padding = embedding.padding_idx  # its vector gets no gradient
    if padding is not None:
        padding = padding - start if start <= padding < stop else None

    def embed(ids: Tensor) -> Tensor:
        mine = (ids >= start) & (ids < stop)
        vectors = F.embedding(torch.where(mine, ids - start, 0), embedding.weight, padding)
        return leave(vectors * mine[..., None])

    embedding.forward = embed
    if isinstance(model, CausalPolicy):
        if tied:
            head.weight = embedding.weight
        else:
            done.keep_part(head, "weight", 0, done.size)
        model.vocabulary = VocabularyShard(start, done.group)
