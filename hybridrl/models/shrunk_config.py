"""A configuration shrunk so far that a trial of the architecture takes a moment."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

from transformers import PretrainedConfig

_HEADS, _HEAD_DIM, SHRUNK_VOCABULARY, SHRUNK_WINDOW, _TRAINED_LENGTH = 4, 16, 128, 8, 24
_MAX_VALUES = {
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "sliding_window": SHRUNK_WINDOW,
    "mamba_chunk_size": SHRUNK_WINDOW,
    "chunk_size": SHRUNK_WINDOW,
    "vocab_size_per_layer_input": SHRUNK_VOCABULARY,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 2 * _HEAD_DIM,
    "qk_rope_head_dim": _HEAD_DIM,
    "v_head_dim": _HEAD_DIM,
}
"""What is larger is made as large as this."""
_WIDTHS = {
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
"""So wide is it made, or a little wider so that it can be cut."""
_ALIGNMENT = 8
"""Columns: kernels for experts want rows of whole 16 bytes on each rank."""


def shrink_config(config: PretrainedConfig, cuts: int = 1, layers: int = 2) -> PretrainedConfig:
    """Return `config` with few and narrow layers in its language model, one or more of each kind
    that it has. Whatever else makes its arithmetic its own stays: kinds of layers, norms, biases,
    caps, scales, rotary positions.

    Args:
        cuts: So many ranks are to share its heads and widths.
        layers: At least so many, of a model that has as many.
    """
    whole = copy.deepcopy(config)
    small = whole.get_text_config()
    heads = _get(small, "num_attention_heads") or _HEADS
    groups = max(1, heads // (_get(small, "num_key_value_heads") or heads))
    few = _multiple(_HEADS, cuts)
    widths = {"hidden_size": few * _HEAD_DIM}
    widths |= {name: _multiple(width, _ALIGNMENT * cuts) for name, width in _WIDTHS.items()}
    for name, most in _MAX_VALUES.items():
        if _is_above(_get(small, name), most):
            _set(small, name, most)
    for name, width in widths.items():
        if _is_above(_get(small, name), 0):
            _set(small, name, width)
    _set(small, "vocab_size", SHRUNK_VOCABULARY)
    _narrow_states(small)
    _set(small, "num_attention_heads", few)
    if _get(small, "num_key_value_heads"):
        _set(small, "num_key_value_heads", _divisor(few, few // groups))
    if _is_above(_get(small, "head_dim"), _HEAD_DIM):
        _set(small, "head_dim", _HEAD_DIM)
    if whole is not small:  # samples are to hold no tokens of pictures
        for name, token in whole.to_dict().items():
            if name.endswith(("_token_id", "_token_index")) and isinstance(token, int):
                _set(whole, name, SHRUNK_VOCABULARY + token)
    _set(small, "pad_token_id", 0)  # some models compute with it
    for name in ("bos_token_id", "eos_token_id"):
        _set(small, name, None)
    _shorten_positions(small)
    kinds = _some_of_each(_get(small, "layer_types") or (), layers)
    _set(small, "num_hidden_layers", len(kinds) or layers)
    if kinds:
        _set(small, "layer_types", kinds)
    return whole


def _multiple(least: int, of: int) -> int:
    return -(-least // of) * of


def _divisor(of: int, most: int) -> int:
    """Return the largest divisor that is at most `most`."""
    return next(n for n in range(max(1, most), 0, -1) if of % n == 0)


def _some_of_each(kinds: Any, layers: int) -> list[str]:
    """Return a few layers in their order, with one of each kind."""
    first = {kind: at for at, kind in reversed(list(enumerate(kinds)))}
    others = [at for at in range(len(kinds)) if at not in first.values()]
    return [kinds[at] for at in sorted([*first.values(), *others[: max(0, layers - len(first))]])]


def _narrow_states(small: PretrainedConfig) -> None:
    """Shrink state space layers: heads whose width follows from the layer's inner width."""
    for heads, width in (("mamba_n_heads", "mamba_d_head"), ("num_heads", "head_dim")):
        expand = _get(small, "mamba_expand") or _get(small, "expand")
        if _get(small, heads) and expand:
            _set(small, width, _HEAD_DIM)
            _set(small, heads, int(expand * small.hidden_size) // _HEAD_DIM)
    if _get(small, "mamba_d_ssm"):
        _set(small, "mamba_d_ssm", small.mamba_n_heads * _HEAD_DIM)


def _shorten_positions(small: PretrainedConfig) -> None:
    """Shorten the trained length, so that positions beyond it are treated as in the large model."""
    name = "original_max_position_embeddings"
    if _get(small, name):
        _set(small, name, _TRAINED_LENGTH)
    rotary = _get(small, "rope_parameters") or {}
    if name in rotary:
        rotary[name] = _TRAINED_LENGTH
    if section := rotary.get("mrope_section"):  # pairs that turn by each of three positions
        width = (_get(small, "head_dim") or _HEAD_DIM) * rotary.get("partial_rotary_factor", 1.0)
        few = [pairs * int(width) // 2 // sum(section) for pairs in section]
        rotary["mrope_section"] = [int(width) // 2 - sum(few[1:]), *few[1:]]
    for name in ("short_factor", "long_factor"):  # of each pair of a head's dims that is turned
        if name in rotary:
            share = rotary.get("partial_rotary_factor") or 1.0
            rotary[name] = rotary[name][: int(_HEAD_DIM * share) // 2]


def _is_above(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > most


def _get(config: PretrainedConfig, name: str) -> Any:
    """Return a setting; None also if layers differ in it, which may raise an error."""
    with contextlib.suppress(Exception):
        return getattr(config, name, None)
    return None


def _set(config: Any, name: str, value: Any) -> None:
    """Set a setting, unless it is computed from others or cannot be changed."""
    with contextlib.suppress(AttributeError, ValueError, TypeError, NotImplementedError):
        setattr(config, name, value)
