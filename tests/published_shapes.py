"""Folders with the configurations of published models, without weights, for plans."""

from transformers import Qwen3Config

_SIZES = {  # width, of a layer's middle, layers, heads, whether the head is the embedding
    "0.6B": (1024, 3072, 28, 16, True),
    "4B": (2560, 9728, 36, 32, True),
    "8B": (4096, 12288, 36, 32, False),
    "32B": (5120, 25600, 64, 64, False),
}


def write_qwen3(folder, size):
    """Write the configuration of a Qwen3 model, and return its folder."""
    hidden, inner, layers, heads, tied = _SIZES[size]
    Qwen3Config(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        tie_word_embeddings=tied,
        **{"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936},
        **{"max_position_embeddings": 1 << 20, "architectures": ["Qwen3ForCausalLM"]},
    ).save_pretrained(folder)
    return str(folder)
