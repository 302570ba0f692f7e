"""The abilities of the installed vLLM: which options of its engine may be set
(`rollout.engine_options`), which classes of models it has, and which sizes its CPU kernels take.
vLLM is not imported, which takes seconds, but its source is read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hybridrl.errors import ConfigError, suggest_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

OPTIONS_WITH_SETTINGS = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "max_num_seqs": "rollout.max_sequences",
    "tensor_parallel_size": "rollout.parallel.tp",
    "gpu_memory_utilization": "rollout.memory_share",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "kv_cache_dtype": "rollout.kv_cache",
    "enforce_eager": "rollout.cuda_graphs",
    "quantization": "rollout.quantization",
}
"""Options with a setting of their own."""
FIXED_OPTIONS = (
    *("runner", "convert", "model_weights", "load_format", "model_loader_extra_config"),
    *("skip_tokenizer_init", "language_model_only", "worker_cls", "worker_extension_cls"),
    *("distributed_executor_backend", "limit_mm_per_prompt"),
    *("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "nnodes"),
    *("enable_sleep_mode", "logprobs_mode", "max_logprobs", "disable_log_stats", "enable_lora"),
    *("quantization_config", "weight_transfer_config", "scheduler_cls", "kv_transfer_config"),
)
"""Options that are right as they are, or generation would be wrong or would not start."""
SPECULATIVE_OPTION = "speculative_config"
TABLES = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS")
PLUGINS = "vllm.general_plugins"
ATTENTION, LATENT_ATTENTION = (
    f"v1/attention/backends/{name}.py" for name in ("cpu_attn", "mla/cpu_mla")
)
LINEAR_HEAD_STEP = 128
"""Of heads of linear attention; its kernel is compiled, so that no source says it."""
_TYPE_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "None": "null",
}
"""Types of options that are known here, in words."""


def check_engine_options(
    options: Mapping[str, Any], temperature: float, in_flight: bool = False
) -> None:
    """Refuse options that vLLM does not know, and those that users must not set.

    Args:
        options: By vLLM's names.
        temperature: Of the samples that are learned from.
        in_flight: New weights come between two tokens.

    Raises:
        ConfigError: names the option, and the setting to use instead.
    """
    for name in options:
        if name in OPTIONS_WITH_SETTINGS:
            raise ConfigError(
                f"rollout.engine_options.{name}: set {OPTIONS_WITH_SETTINGS[name]} instead."
            )
        if name in FIXED_OPTIONS:
            raise ConfigError(
                f"rollout.engine_options.{name}: cannot be set; what brings weights into vLLM and "
                "takes samples from it depends on it."
            )
        known = read_engine_options()
        if known and name not in known:
            free = sorted(known.keys() - OPTIONS_WITH_SETTINGS.keys() - set(FIXED_OPTIONS))
            raise ConfigError(
                f"rollout.engine_options.{name}: the vLLM that is installed has no such option."
                f"{suggest_name(name, free)}"
            )
        _check_type(name, options[name], known.get(name, ""))
    if options.get(SPECULATIVE_OPTION) and temperature != 1:
        raise ConfigError(
            f"rollout.engine_options.{SPECULATIVE_OPTION} with rollout.temperature={temperature}: "
            "vLLM's log-probabilities of tokens that were guessed are right at temperature 1 only. "
            "Set rollout.temperature=1."
        )
    if options.get("async_scheduling") and in_flight:
        raise ConfigError(
            "rollout.engine_options.async_scheduling=true with placement.in_flight=true: a token "
            "would be under way when weights change, and nobody could say whose it is. Choose one."
        )


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Refuse a value of another plain type; vLLM judges all other types."""
    kinds = annotation.split(" | ")
    if value is None or not all(kind in _TYPE_NAMES for kind in kinds):
        return
    found = "str" if isinstance(value, str) else type(value).__name__  # secrets have a class
    if found not in kinds and not (found == "int" and "float" in kinds):
        words = ", or ".join(_TYPE_NAMES[kind] for kind in kinds)
        raise ConfigError(f"rollout.engine_options.{name}={value}: must be {words}.")


def check_served(
    model: PretrainedConfig, who: str, kind: str, dtype: str, *, is_known: Callable[[], bool]
) -> None:
    """Refuses a model that the installed vLLM cannot generate with.

    Args:
        who: The model, for messages.
        kind: Of the devices.
        dtype: Name of the precision.
        is_known: Whether vLLM can run transformers' own class.

    Raises:
        ConfigError: says why, and what to set.
    """
    cure = "rollout=transformers generates with the class that is trained."
    names = model.architectures or ()
    known = known_architectures()
    if known and names and known.isdisjoint(names) and not is_known():
        raise ConfigError(
            f"rollout=vllm: the vLLM that is installed has no class {names[0]} for {who}. {cure}"
        )
    text = model.get_text_config()
    if kind != "cpu":
        return
    width = getattr(text, "linear_key_head_dim", None)
    if width is not None and dtype == "float32":
        raise ConfigError(
            f"rollout=vllm with model.dtype={dtype}: on CPUs vLLM computes the linear attention of "
            f"{who} in bfloat16 only. Set model.dtype=bfloat16; or {cure}"
        )
    if width is not None and width % LINEAR_HEAD_STEP:
        raise ConfigError(
            f"rollout=vllm: on CPUs vLLM computes linear attention with heads of "
            f"{LINEAR_HEAD_STEP} dimensions, and {who} has {width}. {cure}"
        )
    if rank := getattr(text, "kv_lora_rank", None):
        sizes, widths = cpu_head_sizes(LATENT_ATTENTION), {rank + text.qk_rope_head_dim}
    else:
        sizes, widths = cpu_head_sizes(ATTENTION), _head_widths(text)
    if sizes and (wrong := widths - sizes):
        taken = ", ".join(map(str, sorted(sizes)))
        raise ConfigError(
            f"rollout=vllm: on CPUs vLLM's attention takes heads of {taken} dimensions, and {who} "
            f"has {wrong.pop()}. {cure}"
        )


def _head_widths(text: PretrainedConfig) -> set[int]:
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return {width, getattr(text, "global_head_dim", None) or width}


@functools.cache
def known_architectures() -> frozenset[str]:
    """The classes of models that the installed vLLM has an implementation of; none if that cannot
    be said: there is no vLLM, or plugins bring further ones."""
    if any(not plugin.value.startswith("vllm.") for plugin in entry_points(group=PLUGINS)):
        return frozenset()
    return frozenset(
        key.value
        for node in _body("model_executor/models/registry.py")
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        if isinstance(node.targets[0], ast.Name) and node.targets[0].id in TABLES
        for key in node.value.keys
        if isinstance(key, ast.Constant)
    )


@functools.cache
def cpu_head_sizes(backend: str) -> frozenset[int]:
    """The widths of heads that an attention back end of the installed vLLM takes; none if that
    cannot be said."""
    for node in _body(backend):
        for inner in ast.walk(node):
            if isinstance(inner, ast.FunctionDef) and inner.name == "get_supported_head_sizes":
                last = inner.body[-1]
                if isinstance(last, ast.Return) and isinstance(last.value, ast.List):
                    return frozenset(ast.literal_eval(last.value))
    return frozenset()


@functools.cache
def read_engine_options() -> Mapping[str, str]:
    """Return the options of the installed vLLM with their annotations; none without vLLM."""
    classes = (node for node in _body("engine/arg_utils.py") if isinstance(node, ast.ClassDef))
    fields = next((node.body for node in classes if node.name == "EngineArgs"), [])
    return {
        field.target.id: ast.unparse(field.annotation)
        for field in fields
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def _body(module: str) -> Sequence[ast.stmt]:
    """The statements of one of vLLM's files; none if there is no such."""
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        return ()
    source = Path(found.origin).parent / module
    return ast.parse(source.read_text(encoding="utf-8")).body if source.is_file() else ()
