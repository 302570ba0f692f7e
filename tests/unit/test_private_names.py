"""Private names of other libraries, each behind one file: where to look after an upgrade.

They were read in torch 2.13, vLLM 0.32, transformers 5.19, Ray 2.60 and Python 3.11; where a range
is given, in more.
"""

import ast
from pathlib import Path

from package_trees import nodes_of

ROOT = Path(__file__).parents[2] / "hybridrl"
KNOWN = {
    # torch
    "_world": ("parallel/process_group.py", "system/collective_waits.py"),  # 2.11 to 2.13
    "_update_default_pg": ("parallel/process_group.py",),
    "_C": (
        "system/device_traits.py",
        "batch/arrow_columns.py",
        "system/collective_waits.py",
        "models/expert_routing.py",
        "rollout/vllm_startup.py",
    ),
    "_accelerator_setAllocatorSettings": ("rollout/vllm_startup.py",),
    "_foreach_copy_": ("layout/box_table.py",),
    "_has_mkldnn": ("system/device_traits.py",),
    "_int_mm": ("quantization/int8_products.py",),
    "_apply": ("engine/model_folder.py", "engine/train_engine.py"),  # of modules
    "_current_graph_task_id": ("models/expert_routing.py",),
    "_is_amx_tile_supported": ("system/device_traits.py",),
    "_is_avx512_bf16_supported": ("system/device_traits.py",),
    "_distributed_c10d": ("system/collective_waits.py",),
    "_device_types": ("system/collective_waits.py",),
    "_get_backend": ("system/collective_waits.py",),
    "_get_op_type": ("system/collective_waits.py",),
    "_get_sequence_number_for_group": ("system/collective_waits.py",),
    "_flash_attention_forward": ("models/flash_attention.py",),  # 2.11 to 2.13
    "_flash_attention_backward": ("models/flash_attention.py",),  # 2.11 to 2.13
    "_disable_current_modes": ("models/flash_attention.py",),
    "torch.nn.attention._fa4": ("models/flash_attention.py",),  # 2.11 to 2.13
    "_cdata": (
        "layout/tensor_views.py",
        "models/token_bytes.py",
    ),  # of storages, as torch's own
    "_schema": ("rollout/loader_probe.py",),
    "_dynamo": ("rollout/vllm_startup.py",),
    "torch._dynamo.exc": ("engine/compiled_layers.py",),
    "torch._dynamo.backends.registry": ("engine/compiled_layers.py",),
    "torch._functorch": ("engine/compiled_layers.py",),
    "torch._inductor": ("rollout/vllm_startup.py",),
    "torch._inductor.exc": ("engine/compiled_layers.py",),
    "torch.utils._python_dispatch": (
        *("models/flash_attention.py", "models/stored_tensors.py", "models/token_bytes.py"),
        "rollout/loader_probe.py",
    ),
    "torch.utils._pytree": ("rollout/loader_probe.py",),
    # argparse, which has no way to be asked what it takes
    "_actions": ("commands/completion.py",),
    "_SubParsersAction": ("commands/completion.py",),
    # transformers and peft
    "_attn_implementation": ("models/language_model.py",),
    "_from_config": ("models/language_model.py",),  # of classes; public of the auto classes only
    "_gradient_checkpointing_func": ("models/activation_checkpointing.py",),
    "_is_hf_initialized": ("models/meta_model.py",),
    "_keys_to_ignore_on_save": ("models/stored_tensors.py",),
    "_no_split_modules": (
        "engine/compiled_layers.py",
        "models/expert_routing.py",
        "parallel/fsdp.py",
    ),
    "_disable_adapters": ("engine/sharded_model.py",),
    # vLLM
    "_distributed_args": ("rollout/vllm_startup.py",),
    "_adapter_manager": ("rollout/vllm_lora.py",),
    "_apply_weights_onednn": ("rollout/vllm_quantization.py",),
    "_use_zentorch": ("rollout/vllm_weights.py",),
    "vllm._custom_ops": ("rollout/vllm_weights.py",),
    # Python, Ray, fsspec, datasets
    "_SHM_NAME_PREFIX": ("rollout/vllm_startup.py",),  # 3.11 to 3.13
    "_SHM_SAFE_NAME_LENGTH": ("rollout/vllm_startup.py",),
    "_current_frames": ("controller/host_health.py", "rollout/user_code_loop.py"),
    "_json": ("sandbox/confined/object_exchange.py",),  # 3.11 to 3.13
    "_thread": ("sandbox/confined/object_exchange.py",),
    "_private": ("ray_backend/connection.py",),
    "_fingerprint": ("data/token_cache.py",),  # of a `datasets.Dataset`, which has no other
    "_global_node": ("ray_backend/connection.py",),
}
DOCUMENTED = {"_exit", "_asdict", "_replace", "_fields", "_make"}
"""Of `os` and of named tuples: private in spelling only."""


DEFINITIONS = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
FILES = sorted(ROOT.rglob("*.py"))


def is_private(name):
    return name.startswith("_") and not name.startswith("__")


def is_own(value):
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def own_names():
    """Private names that are defined here."""
    found = set()
    for node in (node for path in FILES for node in nodes_of(path)):
        if isinstance(node, DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if is_own(node.value) else set()
    return found


def foreign_names():
    """By private name of others, the files that use it."""
    own, found = own_names() - KNOWN.keys(), {}
    for path in FILES:
        file = path.relative_to(ROOT).as_posix()
        for node in nodes_of(path):
            names = []
            if isinstance(node, ast.Attribute) and node.attr not in own:
                names = [] if is_own(node.value) else [node.attr]
            elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith(
                "hybridrl"
            ):
                names = [alias.name for alias in node.names]
                if any(is_private(part) for part in (node.module or "").split(".")):
                    found.setdefault(node.module, set()).add(file)
            for name in names:
                if is_private(name) and name not in DOCUMENTED:
                    found.setdefault(name, set()).add(file)
    return found


def test_private_names_of_others_stay_where_they_are_known_to_be():
    found = foreign_names()
    here = {name: tuple(sorted(files)) for name, files in found.items()}
    known = {name: tuple(sorted(files)) for name, files in KNOWN.items()}
    assert here == known, (
        "Private names of other libraries may change with any release. Use the public interface; "
        "where there is none, keep the name behind one file, and list it in KNOWN."
    )
