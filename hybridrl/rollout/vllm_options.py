"""`rollout.engine_options`: which options of vLLM's engine may be set. vLLM is not imported, which
takes seconds, but its source is read.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridrl.errors import ConfigError, nearest

TAKEN = {
    "model": "model.path",
    "tokenizer": "model.tokenizer",
    "dtype": "model.dtype",
    "seed": "run.seed",
    "max_model_len": "data.max_prompt_tokens and rollout.max_tokens",
    "max_num_seqs": "rollout.max_sequences",
    "tensor_parallel_size": "rollout.parallel.tp",
    "gpu_memory_utilization": "rollout.memory_share",
    "kv_cache_memory_bytes": "rollout.kv_cache_gib",
    "enforce_eager": "rollout.cuda_graphs",
    "quantization": "rollout.quantization",
}
"""Options with a setting of their own."""
OURS = (
    *("runner", "convert", "model_weights", "load_format", "model_loader_extra_config"),
    *("skip_tokenizer_init", "distributed_executor_backend", "worker_cls", "worker_extension_cls"),
    *("pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel", "nnodes"),
    *("enable_sleep_mode", "logprobs_mode", "max_logprobs", "disable_log_stats", "enable_lora"),
    *("quantization_config", "weight_transfer_config", "scheduler_cls", "kv_transfer_config"),
)
"""Options that are right as they are, or generation would be wrong or would not start."""
SPECULATIVE = "speculative_config"
PLAIN = {
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
    """Refuses what vLLM does not know, and what is not the user's to set.

    Args:
        options: By vLLM's names.
        temperature: Of the samples that are learned from.
        in_flight: New weights come between two tokens.

    Raises:
        ConfigError: names the option, and the setting to use instead.
    """
    for name in options:
        if name in TAKEN:
            raise ConfigError(f"rollout.engine_options.{name}: set {TAKEN[name]} instead.")
        if name in OURS:
            raise ConfigError(
                f"rollout.engine_options.{name}: cannot be set; what brings weights into vLLM and "
                "takes samples from it depends on it."
            )
        known = engine_options()
        if known and name not in known:
            free = sorted(known.keys() - TAKEN.keys() - set(OURS))
            raise ConfigError(
                f"rollout.engine_options.{name}: the vLLM that is installed has no such option."
                f"{nearest(name, free)}"
            )
        _check_type(name, options[name], known.get(name, ""))
    if options.get(SPECULATIVE) and temperature != 1:
        raise ConfigError(
            f"rollout.engine_options.{SPECULATIVE} with rollout.temperature={temperature}: vLLM's "
            "log-probabilities of tokens that were guessed are right at temperature 1 only. Set "
            "rollout.temperature=1."
        )
    if options.get("async_scheduling") and in_flight:
        raise ConfigError(
            "rollout.engine_options.async_scheduling=true with placement.in_flight=true: a token "
            "would be under way when weights change, and nobody could say whose it is. Choose one."
        )


def _check_type(name: str, value: Any, annotation: str) -> None:
    """Refuses a value of another type, where that is a plain one; of others vLLM has to say."""
    kinds = annotation.split(" | ")
    if value is None or not all(kind in PLAIN for kind in kinds):
        return
    found = type(value).__name__
    if found not in kinds and not (found == "int" and "float" in kinds):
        words = ", or ".join(PLAIN[kind] for kind in kinds)
        raise ConfigError(f"rollout.engine_options.{name}={value}: must be {words}.")


@functools.cache
def engine_options() -> Mapping[str, str]:
    """The options of the installed vLLM's engine with their types as they are written there; none
    if there is no vLLM."""
    if (found := importlib.util.find_spec("vllm")) is None or found.origin is None:
        return {}
    source = Path(found.origin).parent / "engine" / "arg_utils.py"
    if not source.is_file():
        return {}
    body = ast.parse(source.read_text(encoding="utf-8")).body
    classes = (node for node in body if isinstance(node, ast.ClassDef))
    fields = next((node.body for node in classes if node.name == "EngineArgs"), [])
    return {
        field.target.id: ast.unparse(field.annotation)
        for field in fields
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
