"""The policy's LoRA adapter in vLLM, beside the weights, loaded from memory instead of a folder.

vLLM reads adapters from folders. Here their tensors are given to what it has read them into, so
that nothing is written: the adapter is always there under its number when a request asks for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, get_args

from torch import Tensor
from vllm.config.lora import MaxLoRARanks
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from hybridrl.config.schema import LoraAdapterConfig
from hybridrl.errors import ConfigError

_ADAPTER_ID = 1


class VLLMAdapter:
    """The policy's adapter inside vLLM.

    Args:
        settings: With which they were made.

    Attributes:
        options: For vLLM's engine.
        request: For every request; None until there are any, which is as if they did nothing.

    Raises:
        ConfigError: if their rank is larger than vLLM's largest.
    """

    def __init__(self, settings: LoraAdapterConfig) -> None:
        sizes = [size for size in get_args(MaxLoRARanks) if size >= settings.rank]
        if not sizes:
            raise ConfigError(
                f"rollout.adapters=separate: vLLM takes adapters of rank "
                f"{max(get_args(MaxLoRARanks))} at most, and actor.lora.rank={settings.rank}. Set "
                "rollout.adapters=merged."
            )
        self.options = {
            "enable_lora": True,
            "max_lora_rank": min(sizes),
            "max_loras": 1,
            "max_cpu_loras": 1,
        }
        self.request: LoRARequest | None = None
        self._settings = settings

    def load(self, worker: Any, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the values of the adapter.

        Args:
            worker: vLLM's, of this rank.
            weights: By peft's names, whole.

        Raises:
            ConfigError: if vLLM cannot put an adapter beside one of the layers.
        """
        lora, alpha = self._settings, self._settings.alpha
        manager = worker.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        found = LoRAModel.from_lora_tensors(
            _ADAPTER_ID,
            {name: tensor.detach().clone() for name, tensor in weights},  # it scales them in place
            PEFTHelper(r=lora.rank, lora_alpha=alpha, target_modules="all-linear"),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=None if mapper is None else mapper.get_rename_mapper(),
        )
        fused = (name for names in manager.packed_modules.values() for name in names)
        if unknown := sorted(found.loras.keys() - {*manager.modules, *fused}):
            raise ConfigError(
                f"rollout.adapters=separate: vLLM cannot put an adapter beside {unknown[0]}, one "
                f"of {len(unknown)} such layers. Set rollout.adapters=merged, or leave them out of "
                "actor.lora.targets."
            )
        manager.remove_adapter(_ADAPTER_ID)
        manager.add_adapter(found)
        manager.activate_adapter(_ADAPTER_ID)
        # Nothing is read from the path, because the number is known.
        self.request = LoRARequest("policy", _ADAPTER_ID, "in memory")
