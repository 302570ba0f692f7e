"""A tokenizer with one token per character, for models small enough to train on a laptop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from hybridrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz"
PRINTABLE_CHARACTERS = "".join(map(chr, range(ord(" "), ord("~") + 1))) + "\n"
"""For texts of others: printable ASCII and line ends."""
PAD_TOKEN, EOS_TOKEN, UNKNOWN_TOKEN = "<pad>", "<eos>", "<unk>"
BEGIN_TOKEN = "<|im_start|>"
_BYTE_LEVEL_SPELLING = str.maketrans({" ": "Ġ", "\n": "Ċ"})
_CHAT_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<eos>' }}{% endif %}
{%- for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}
{%- if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}{{ '<tool_call>' }}
{{- {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
{{- '</tool_call>' }}{% endfor %}{{ '<eos>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""


def build_character_tokenizer(
    characters: str = CHARACTERS, *, chat: bool = False
) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose tokens are `<pad>`, `<eos>`, `<unk>` and these characters.

    Encoding adds nothing and decoding joins exactly. `save_pretrained` writes a folder that
    `AutoTokenizer` (and so vLLM) loads. The default alphabet makes 49 tokens; round a model's
    `vocab_size` up to a multiple of 64, so that tensor parallelism divides it and the matrix sizes
    suit the hardware: the ids beyond `len(tokenizer)` then stand for nothing and decode to nothing.

    Args:
        chat: With a token `<|im_start|>` besides, and a chat template: a message is its role in a
            line, its content, and `<eos>`.

    Raises:
        DataError: if a character is repeated or is neither printable ASCII nor a line end.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrong = sorted(
        {c for c in characters if c not in PRINTABLE_CHARACTERS or characters.count(c) > 1}
    )
    if wrong or not characters:
        raise DataError(
            f"A character tokenizer needs distinct printable ASCII characters, `{characters}` has "
            f"these repeated or outside of ASCII: {wrong}."
        )
    # Byte-level BPE without merges, where a space is spelled `Ġ`. A word-level model would say the
    # same more plainly, but AutoTokenizer rebuilds the tokenizer of a `qwen2` folder as byte-level
    # BPE whatever its files say; this form comes back unchanged from that too.
    tokens = [
        PAD_TOKEN,
        EOS_TOKEN,
        UNKNOWN_TOKEN,
        *([BEGIN_TOKEN] if chat else []),
        *characters.translate(_BYTE_LEVEL_SPELLING),
    ]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN_TOKEN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    build: Callable[..., PreTrainedTokenizerFast] = PreTrainedTokenizerFast
    found = build(
        tokenizer_object=tokenizer,
        pad_token=PAD_TOKEN,
        eos_token=EOS_TOKEN,
        unk_token=UNKNOWN_TOKEN,
        clean_up_tokenization_spaces=False,
        extra_special_tokens=[BEGIN_TOKEN] if chat else [],
    )
    if chat:
        found.chat_template = _CHAT_TEMPLATE
    return found
