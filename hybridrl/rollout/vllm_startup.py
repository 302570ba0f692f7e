"""The start of vLLM's engine in a worker: its environment, its options, and what it says when
it does not start. Importing this module needs vLLM."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from multiprocessing import shared_memory
from typing import Any, ClassVar

import torch

from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import VLLM_INSTALL, ConfigError, MissingPackageError
from hybridrl.models.model_loading import load_model_config
from hybridrl.quantization.rounded_matrix import NONE
from hybridrl.rollout.rollout_engine import EngineSetup
from hybridrl.rollout.vllm_options import SPECULATIVE_OPTION
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.host_variables import ALLOCATOR, COMPILE_THREADS, OLD_ALLOCATOR
from hybridrl.system.shared_memory import lock_shared_memory

_COMPILE_THREADS = os.environ.get(COMPILE_THREADS)
# Read by vLLM when it is imported.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",  # the engine lives in this process
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # threads are shared with training
    VLLM_NO_USAGE_STATS="1",
    VLLM_DO_NOT_TRACK="1",
)
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
if not torch.accelerator.is_available():
    # On CPUs vLLM compiles two helper functions at the first generation: half a minute on a new
    # machine, to save microseconds a token.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch._dynamo.config.disable = True

try:
    from vllm import LLM
    from vllm.distributed import parallel_state
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    from hybridrl.rollout import vllm_weights
    from hybridrl.rollout.vllm_classes import register_classes
    from hybridrl.rollout.vllm_quantization import METHOD_PREFIX
except ImportError as error:
    raise MissingPackageError(
        "rollout=vllm needs vLLM, which could not be imported "
        f"({error}): {VLLM_INSTALL}. Or generate with transformers: rollout=transformers."
    ) from error

# It warns at each sync of layers for which no weights came: heads that are the embedding, and
# tables. A filter, because vLLM sets the levels anew when it starts.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").addFilter(
    lambda record: record.levelno > logging.WARNING
)

# It tries a chat template with the tokenizer that it was told not to load, and shows a traceback.
logging.getLogger("vllm.renderers.base").addFilter(
    lambda record: not str(record.msg).startswith("Chat template warmup failed")
)

HEAD_DTYPE = "float32"
"""Of logits, as `hybridrl.models.log_probs` computes them: rounded to half precision they would be
most of the difference between the trainer's log-probabilities and the generator's."""

_GROUPS = [
    name
    for name, kind in parallel_state.__annotations__.items()
    if name.isupper() and ("GroupCoordinator" in str(kind) or name == "_NODE_COUNT")
]


class VLLMProcessGroups:
    """The process groups of one engine, made by vLLM when they are first entered.

    vLLM keeps them in variables of a module: one set for a process. Here a process may hold several
    engines - the actor's and a judge's - in worker groups of different devices.
    """

    _current: ClassVar[VLLMProcessGroups | None] = None

    def __init__(self) -> None:
        self._kept: dict[str, Any] = dict.fromkeys(_GROUPS)

    def enter(self) -> None:
        """Make these the process groups that vLLM uses."""
        if (left := VLLMProcessGroups._current) is self:
            return
        if left is not None:
            left._kept = {name: getattr(parallel_state, name) for name in _GROUPS}
        for name, group in self._kept.items():
            setattr(parallel_state, name, group)
        VLLMProcessGroups._current = self


def start_vllm(setup: EngineSetup, config: RolloutConfig, further: Mapping[str, Any]) -> LLM:
    """Start an engine on the process group that is the current one.

    Args:
        further: Options of what it is to do besides.

    Raises:
        ConfigError: if it does not start, with the first of what vLLM says.
    """
    path, device = setup.path, setup.device
    shares_memory = device.type != "cpu" and config.parallel.tp > 1
    if shares_memory:
        _check_visible_gpus(config.parallel.tp)
        _set_expandable_segments(False)
    options = dict(config.engine_options)
    guesses, rounds = bool(options.get(SPECULATIVE_OPTION)), config.quantization
    _name_shared_memory(setup.job)
    threads, set_threads = torch.get_num_threads(), torch.set_num_threads
    try:
        register_classes(load_model_config(path).architectures or ())
        return LLM(
            path,
            tokenizer=setup.tokenizer,
            dtype=setup.dtype,
            quantization=None if rounds == NONE else METHOD_PREFIX + rounds,
            hf_overrides={"head_dtype": HEAD_DTYPE} | options.pop("hf_overrides", {}),
            seed=setup.seed,
            max_model_len=setup.context_length,
            max_num_seqs=config.max_sequences,
            load_format=vllm_weights.LOAD_FORMAT,
            model_loader_extra_config={vllm_weights.INCOMING_SHAPES: setup.coming or {}},
            skip_tokenizer_init=not (setup.stop_texts or config.stop),
            language_model_only=True,  # pictures are not read: no tower, no processor
            tensor_parallel_size=config.parallel.tp,
            distributed_executor_backend="external_launcher",
            # Those that vLLM calls processed are wrong for tokens that were guessed.
            logprobs_mode="raw_logprobs" if guesses else "processed_logprobs",
            disable_log_stats=not guesses,
            # On where vLLM can: a token is then under way while the last one is read.
            **{"async_scheduling": False if setup.changes_in_flight else None}
            | _by_device(config, device, setup.sleeps)
            | options
            | further,
        )
    except Exception as error:  # of many kinds: models and devices have their own
        raise ConfigError(_explain(error, path, config)) from error
    finally:
        torch.set_num_threads = set_threads  # vLLM replaces it on CPUs
        torch.set_num_threads(threads)
        if shares_memory:
            _set_expandable_segments(True)
        if device.type != "cpu":
            _restore_compile_threads()


def _check_visible_gpus(tp: int) -> None:
    if (seen := torch.accelerator.device_count()) < tp:
        raise ConfigError(
            f"rollout.parallel.tp={tp}: ranks that generate together have to see each other's "
            f"GPUs, and CUDA shows this process {seen} of them (a process sees a single MIG "
            f"instance). Set rollout.parallel.tp={seen}, or use whole GPUs."
        )


def _set_expandable_segments(allowed: bool) -> None:
    """Set whether expandable segments are used where the environment asks for them. Ranks map each
    other's memory by CUDA IPC in vLLM's all-reduce; with such segments vLLM ends the process."""
    settings = os.environ.get(ALLOCATOR) or os.environ.get(OLD_ALLOCATOR) or ""
    wanted, instead = "expandable_segments:True", "expandable_segments:False"
    if wanted in settings:
        torch._C._accelerator_setAllocatorSettings(
            settings if allowed else settings.replace(wanted, instead)
        )


def _restore_compile_threads() -> None:
    """Let layers that are trained be compiled with the threads of before vLLM's import, which sets
    1. vLLM has compiled its own."""
    from torch._inductor import config

    config.compile_threads = int(_COMPILE_THREADS or count_usable_cores())


_CACHE_DTYPES = {"auto": "auto", "bf16": "bfloat16", "fp8": "fp8"}
"""What vLLM calls the values of `rollout.kv_cache`."""


def _by_device(config: RolloutConfig, device: torch.device, sleeps: bool) -> dict[str, Any]:
    """Return the options that differ between GPUs and CPUs."""
    if device.type != "cpu":
        return {
            "gpu_memory_utilization": config.memory_share,
            "kv_cache_dtype": _CACHE_DTYPES[config.kv_cache],
            "enforce_eager": not config.cuda_graphs,
            "enable_sleep_mode": sleeps,
            "enable_prefix_caching": True,
            "enable_return_routed_experts": config.routing_replay,
        }
    return {
        "kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        # A request's own seed and a prompt read in parts do not go together on CPUs: vLLM
        # winds the random state back after each part, which only CUDA's can be.
        "enable_chunked_prefill": False,
    }


def _name_shared_memory(job: str) -> None:
    """Name vLLM's shared-memory segments after the job, so that leftovers can be found and removed.

    The segments of its CPU collectives are named by what follows the last colon of the address to
    meet at, which with an external launcher is the same in every job: the leftovers of a killed one
    would stop the next. The address is not used otherwise, because the process group exists
    already. Those of its message queues are named by Python, at random.
    """
    lock_shared_memory(job)
    shared_memory._SHM_NAME_PREFIX = f"/{job}-"
    shared_memory._SHM_SAFE_NAME_LENGTH = len(job) + 2 + 8

    def distributed_args(self: ExecutorWithExternalLauncher) -> tuple[str, int, int]:
        rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
        return f"env://:{job}", rank, local_rank

    ExecutorWithExternalLauncher._distributed_args = distributed_args


def _explain(error: Exception, path: str, config: RolloutConfig) -> str:
    said = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(said) > 1 and "validation error" in said[0]:  # pydantic's: what is wrong comes below
        said = [said[1].removeprefix("Value error, ").partition(" [type=")[0]]
    why = said[0] if said else "it does not say why"
    if not isinstance(error, ValueError):
        why = f"{type(error).__name__}: {why}"
    if options := config.engine_options:
        why += f" (rollout.engine_options={dict(options)})"
    return (
        f"vLLM does not start with {path}: {why} (rollout.max_tokens={config.max_tokens}, "
        f"rollout.parallel.tp={config.parallel.tp}, rollout.kv_cache_gib="
        f"{config.kv_cache_gib}, rollout.memory_share={config.memory_share}). The worker's log has "
        "all that it said. A model that vLLM cannot run on this device can be generated with by "
        "rollout=transformers."
    )
