"""Models as they are published, scaled down: folders of the class, names of tensors, config.json,
chat template and processor files of a family, with few random weights in bfloat16.

Tokens are bytes, so every text can be read. `publish(folder, name)` makes one of `PUBLISHED`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """\
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}
{{- '<|im_end|>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
GEMMA = """\
{{- bos_token }}{% for message in messages %}
{%- set role = 'model' if message.role == 'assistant' else message.role %}
{{- '<start_of_turn>' + role + '\n' + message.content + '<end_of_turn>\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"""
MISTRAL = """\
{{- bos_token }}{% for message in messages %}
{%- if message.role == 'assistant' %}{{ message.content + eos_token }}
{%- elif message.role == 'system' %}{{ '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' }}
{%- else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}{% endfor %}"""
GLM = """\
{{- '[gMASK]<sop>' }}{% for message in messages %}
{{- '<|' + message.role + '|>\n' + message.content }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"""
HARMONY = """\
{%- for message in messages %}{{ '<|start|>' + message.role }}
{%- if message.role == 'assistant' %}{{ '<|channel|>final' }}{% endif %}
{{- '<|message|>' + message.content }}
{{- '<|return|>' if loop.last and message.role == 'assistant' else '<|end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
LLAMA = """\
{{- bos_token }}{% for message in messages %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + message.content }}
{{- '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""
DEEPSEEK = """\
{{- bos_token }}{% for message in messages %}
{%- if message.role == 'user' %}{{ '<|User|>' + message.content }}
{%- elif message.role == 'assistant' %}{{ '<|Assistant|>' + message.content + eos_token }}
{%- else %}{{ message.content }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}"""

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
QWEN_IMAGES = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
GEMMA_IMAGES = ["<start_of_image>", "<end_of_image>", "<image_soft_token>"]
GEMMA4_IMAGES = ["<|image>", "<|image|>", "<image|>", "<|audio>", "<|audio|>", "<audio|>"]
MISTRAL_IMAGES = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
GLM_IMAGES = ["<|begin_of_image|>", "<|image|>", "<|end_of_image|>"]
GLM_VIDEOS = ["<|begin_of_video|>", "<|video|>", "<|end_of_video|>"]


class Words(NamedTuple):
    """The special tokens of a family.

    Attributes:
        specials: All of them, beside those below.
        ends: What ends a turn; the tokenizer's end of sequence.
        pads: What pads.
        begins: What begins a sequence; None: nothing.
        template: Of conversations.
        named: Attributes of the tokenizer that its processor reads, with their tokens.
    """

    specials: list[str]
    ends: str
    pads: str
    begins: str | None
    template: str
    named: Mapping[str, str] = {}


class Published(NamedTuple):
    """A model as it is published.

    Attributes:
        architecture: The class that its config.json names.
        words: Its special tokens.
        config: Its configuration, given the ids of the tokens.
        renamed: Names of tensors in its files, from those of transformers' class: pairs of a
            pattern and what stands in its place.
        unbuilt: Tensors of its files that transformers' class has not, by name.
        beside: Files of its processor, by name.
    """

    architecture: str
    words: Words
    config: Callable[[Callable[[str], int]], dict[str, Any]]
    renamed: tuple[tuple[str, str], ...] = ()
    unbuilt: Mapping[str, tuple[int, ...]] = {}
    beside: Mapping[str, Any] = {}


QWEN = Words(
    ["<|im_start|>", "<think>", "</think>", *QWEN_IMAGES],
    "<|im_end|>",
    "<|endoftext|>",
    None,
    CHATML,
    {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_bos_token": "<|vision_start|>",
        "vision_eos_token": "<|vision_end|>",
    },
)
GEMMA_WORDS = Words(
    ["<start_of_turn>", "<eos>", *GEMMA_IMAGES],
    "<end_of_turn>",
    "<pad>",
    "<bos>",
    GEMMA,
    {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
)
GEMMA4_WORDS = Words(
    ["<start_of_turn>", "<eos>", *GEMMA4_IMAGES],
    "<end_of_turn>",
    "<pad>",
    "<bos>",
    GEMMA,
    {
        "boi_token": "<|image>",
        "image_token": "<|image|>",
        "eoi_token": "<image|>",
        "boa_token": "<|audio>",
        "audio_token": "<|audio|>",
        "eoa_token": "<audio|>",
    },
)
MISTRAL_WORDS = Words(
    ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", *MISTRAL_IMAGES],
    "</s>",
    "<pad>",
    "<s>",
    MISTRAL,
)
GLM_WORDS = Words(
    ["[gMASK]", "<sop>", "<|system|>", "<|assistant|>", *GLM_IMAGES, *GLM_VIDEOS],
    "<|user|>",
    "<|endoftext|>",
    None,
    GLM,
    {"image_token": "<|image|>", "video_token": "<|video|>"},
)
HARMONY_WORDS = Words(
    ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>"],
    "<|return|>",
    "<|endoftext|>",
    "<|startoftext|>",
    HARMONY,
)
LLAMA_WORDS = Words(
    ["<|start_header_id|>", "<|end_header_id|>"],
    "<|eot_id|>",
    "<|finetune_right_pad_id|>",
    "<|begin_of_text|>",
    LLAMA,
)
DEEPSEEK_WORDS = Words(
    ["<|User|>", "<|Assistant|>"],
    "<|end_of_sentence|>",
    "<|pad|>",
    "<|begin_of_sentence|>",
    DEEPSEEK,
)


def _qwen3(id_of: Callable[[str], int]) -> dict[str, Any]:
    return {**SMALL, "tie_word_embeddings": True}


def _qwen_images(id_of: Callable[[str], int]) -> dict[str, int]:
    return {
        "image_token_id": id_of("<|image_pad|>"),
        "video_token_id": id_of("<|video_pad|>"),
        "vision_start_token_id": id_of("<|vision_start|>"),
        "vision_end_token_id": id_of("<|vision_end|>"),
    }


def _qwen3_5(id_of: Callable[[str], int]) -> dict[str, Any]:
    text = {
        **SMALL,
        "num_hidden_layers": 4,
        "layer_types": [*["linear_attention"] * 3, "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "mtp_num_hidden_layers": 1,
    }
    return {"text_config": text, "vision_config": QWEN_VISION, **_qwen_images(id_of)}


def _qwen3_vl(id_of: Callable[[str], int]) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 5000000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    vision = {**QWEN_VISION, "deepstack_visual_indexes": [0]}
    text = {**SMALL, "rope_parameters": rope}
    return {
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": True,
        **_qwen_images(id_of),
    }


def _gemma3(id_of: Callable[[str], int]) -> dict[str, Any]:
    text = {**SMALL, "sliding_window": 32, "sliding_window_pattern": 2, "query_pre_attn_scalar": 16}
    return {
        "text_config": text,
        "vision_config": {**SIGLIP, "vision_use_head": False},
        "mm_tokens_per_image": 4,
        "boi_token_index": id_of("<start_of_image>"),
        "eoi_token_index": id_of("<end_of_image>"),
        "image_token_index": id_of("<image_soft_token>"),
    }


def _gemma4(id_of: Callable[[str], int]) -> dict[str, Any]:
    text = {
        **SMALL,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 32,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 320,
        "num_kv_shared_layers": 0,
        "final_logit_softcapping": 30.0,
    }
    vision = {**SIGLIP, "num_key_value_heads": 2, "head_dim": 16, "position_embedding_size": 16}
    del vision["image_size"]
    return {
        "text_config": text,
        "vision_config": vision,
        "audio_config": None,
        "boi_token_id": id_of("<|image>"),
        "image_token_id": id_of("<|image|>"),
        "eoi_token_id": id_of("<image|>"),
        "boa_token_id": id_of("<|audio>"),
        "audio_token_id": id_of("<|audio|>"),
        "eoa_token_index": id_of("<audio|>"),
        "video_token_id": id_of("<|image|>"),
    }


def _mistral3(id_of: Callable[[str], int]) -> dict[str, Any]:
    return {
        "text_config": {"model_type": "mistral", **SMALL, "sliding_window": None},
        "vision_config": {"model_type": "pixtral", **SIGLIP, "head_dim": 16},
        "spatial_merge_size": 2,
        "image_token_index": id_of("[IMG]"),
        "tie_word_embeddings": False,
    }


def _gpt_oss(id_of: Callable[[str], int]) -> dict[str, Any]:
    layers = ["sliding_attention", "full_attention"]
    return {
        **SMALL,
        "max_position_embeddings": 131072,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 32,
        "layer_types": layers,
    }


def _glm46v(id_of: Callable[[str], int]) -> dict[str, Any]:
    rope = {
        "rope_type": "default",
        "rope_theta": 500000.0,
        "mrope_section": [4, 2, 2],
        "partial_rotary_factor": 0.5,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "image_size": 56,
        "patch_size": 14,
    }
    return {
        "text_config": {**SMALL, "rope_parameters": rope},
        "vision_config": vision,
        "image_token_id": id_of("<|image|>"),
        "video_token_id": id_of("<|video|>"),
        "image_start_token_id": id_of("<|begin_of_image|>"),
        "image_end_token_id": id_of("<|end_of_image|>"),
        "video_start_token_id": id_of("<|begin_of_video|>"),
        "video_end_token_id": id_of("<|end_of_video|>"),
    }


def _glm4_moe(id_of: Callable[[str], int]) -> dict[str, Any]:
    return {**SMALL, **EXPERTS, "use_qk_norm": True, "num_nextn_predict_layers": 1}


def _deepseek_v3(id_of: Callable[[str], int]) -> dict[str, Any]:
    latent = {
        "q_lora_rank": 32,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": 1,
    }
    return {**{k: v for k, v in SMALL.items() if k != "head_dim"}, **EXPERTS, **latent}


def _llama(id_of: Callable[[str], int]) -> dict[str, Any]:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    }
    return {**SMALL, "rope_parameters": rope, "tie_word_embeddings": False}


def _next_tokens(prefix: str, attention: str = "self_attn.q_proj.weight") -> dict[str, Any]:
    """Some tensors of a layer that predicts further tokens."""
    return {
        f"{prefix}enorm.weight": (64,),
        f"{prefix}hnorm.weight": (64,),
        f"{prefix}eh_proj.weight": (64, 128),
        f"{prefix}shared_head.norm.weight": (64,),
        f"{prefix}{attention}": (64, 64),
        f"{prefix}mlp.experts.0.up_proj.weight": (32, 64),
    }


QWEN_IMAGE_FILE = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
}
QWEN_FILES = {
    "preprocessor_config.json": {**QWEN_IMAGE_FILE, "processor_class": "Qwen3VLProcessor"},
    "video_preprocessor_config.json": {
        "video_processor_type": "Qwen3VLVideoProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
    },
}
GEMMA3_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Gemma3ImageProcessor",
        "image_seq_length": 4,
        "size": {"height": 56, "width": 56},
        "processor_class": "Gemma3Processor",
    },
    "processor_config.json": {"image_seq_length": 4, "processor_class": "Gemma3Processor"},
}
GEMMA4_FILES = {
    "processor_config.json": {
        "image_processor": {"image_processor_type": "Gemma4ImageProcessor", "patch_size": 14},
        "processor_class": "Gemma4Processor",
    },
}
MISTRAL_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "PixtralImageProcessor",
        "patch_size": {"height": 14, "width": 14},
        "size": {"longest_edge": 56},
        "processor_class": "PixtralProcessor",
    },
    "processor_config.json": {
        "image_token": "[IMG]",
        "image_break_token": "[IMG_BREAK]",
        "image_end_token": "[IMG_END]",
        "patch_size": 14,
        "spatial_merge_size": 2,
        "processor_class": "PixtralProcessor",
    },
}
GLM_FILES = {
    "preprocessor_config.json": {
        "image_processor_type": "Glm46VImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "processor_class": "Glm46VProcessor",
    },
}
LANGUAGE_INSIDE = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^model\.(vision_tower|multi_modal_projector)\.", r"\1."),
)
"""Names of those that were published before transformers moved its parts."""

PUBLISHED = {
    "qwen3": Published("Qwen3ForCausalLM", QWEN, _qwen3),
    "qwen3_5": Published(
        "Qwen3_5ForConditionalGeneration",
        QWEN,
        _qwen3_5,
        unbuilt={
            "mtp.fc.weight": (64, 128),
            "mtp.norm.weight": (64,),
            "mtp.pre_fc_norm_embedding.weight": (64,),
            "mtp.layers.0.self_attn.q_proj.weight": (128, 64),
        },
        beside=QWEN_FILES,
    ),
    "qwen3_vl": Published("Qwen3VLForConditionalGeneration", QWEN, _qwen3_vl, beside=QWEN_FILES),
    "gemma3": Published(
        "Gemma3ForConditionalGeneration",
        GEMMA_WORDS,
        _gemma3,
        renamed=(
            *LANGUAGE_INSIDE,
            (r"^vision_tower\.(?!vision_model)", "vision_tower.vision_model."),
        ),
        beside=GEMMA3_FILES,
    ),
    "gemma4": Published(
        "Gemma4ForConditionalGeneration", GEMMA4_WORDS, _gemma4, beside=GEMMA4_FILES
    ),
    "mistral3": Published(
        "Mistral3ForConditionalGeneration",
        MISTRAL_WORDS,
        _mistral3,
        renamed=(*LANGUAGE_INSIDE, (r"^lm_head\.", "language_model.lm_head.")),
        beside=MISTRAL_FILES,
    ),
    "gpt_oss": Published("GptOssForCausalLM", HARMONY_WORDS, _gpt_oss),
    "glm46v": Published("Glm46VForConditionalGeneration", GLM_WORDS, _glm46v, beside=GLM_FILES),
    "glm4_moe": Published(
        "Glm4MoeForCausalLM", GLM_WORDS, _glm4_moe, unbuilt=_next_tokens("model.layers.2.")
    ),
    "deepseek_v3": Published(
        "DeepseekV3ForCausalLM",
        DEEPSEEK_WORDS,
        _deepseek_v3,
        unbuilt=_next_tokens("model.layers.2.", "self_attn.kv_b_proj.weight"),
    ),
    "llama": Published("LlamaForCausalLM", LLAMA_WORDS, _llama),
}


def byte_tokenizer(words: Words) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes with the special tokens and the template of a family."""
    begins = [words.begins] if words.begins else []
    specials = [words.pads, words.ends, *begins, *words.specials]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({t: n for n, t in enumerate([*specials, *alphabet])}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(specials)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=words.ends,
        pad_token=words.pads,
        bos_token=words.begins,
        extra_special_tokens=dict(words.named),
    )
    tokenizer.chat_template = words.template
    return tokenizer


def publish(folder: Path, name: str, seed: int = 0) -> Path:
    """Writes one of `PUBLISHED` to a folder, which is made, and gives the folder."""
    model = PUBLISHED[name]
    tokenizer = byte_tokenizer(model.words)
    kind = getattr(transformers, model.architecture)
    described = model.config(tokenizer.convert_tokens_to_ids)
    text = described.get("text_config", described)
    text["vocab_size"] = -(-len(tokenizer) // 64) * 64
    ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text |= {**ids, "bos_token_id": tokenizer.bos_token_id}
    config = kind.config_class(**described)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = kind._from_config(config, dtype=torch.bfloat16)
        made.save_pretrained(folder)
        unbuilt = {name: torch.randn(shape).bfloat16() for name, shape in model.unbuilt.items()}
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for pattern, there in model.renamed:
        tensors = {re.sub(pattern, there, name): tensor for name, tensor in tensors.items()}
    save_file({**tensors, **unbuilt}, file, {"format": "pt"})
    tokenizer.save_pretrained(folder)
    for file_name, content in model.beside.items():
        (folder / file_name).write_text(json.dumps(content, indent=2))
    return folder
