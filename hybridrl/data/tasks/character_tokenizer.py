"""A tokenizer with one token per character, for models small enough to train on a laptop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybridrl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

CHARACTERS = "0123456789+-*/=()., abcdefghijklmnopqrstuvwxyz"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"


def build_tokenizer(characters: str = CHARACTERS) -> PreTrainedTokenizerFast:
    """Returns a tokenizer whose tokens are `<pad>`, `<eos>`, `<unk>` and these characters.

    Encoding adds nothing and decoding joins exactly. `save_pretrained` writes a folder that
    `AutoTokenizer` (and so vLLM) loads. The default alphabet makes 49 tokens; round a model's
    `vocab_size` up to a multiple of 64, so that tensor parallelism divides it and the matrix sizes
    suit the hardware: the ids beyond `len(tokenizer)` then stand for nothing and decode to nothing.

    Raises:
        DataError: if a character is repeated or is not printable ASCII.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    wrong = sorted({c for c in characters if not " " <= c <= "~" or characters.count(c) > 1})
    if wrong or not characters:
        raise DataError(
            f"A character tokenizer needs distinct printable ASCII characters, `{characters}` has "
            f"these repeated or outside of ASCII: {wrong}."
        )
    # Byte-level BPE without merges, where a space is spelled `Ġ`. A word-level model would say the
    # same more plainly, but AutoTokenizer rebuilds the tokenizer of a `qwen2` folder as byte-level
    # BPE whatever its files say; this form comes back unchanged from that too.
    tokens = [PAD, EOS, UNKNOWN, *characters.replace(" ", "Ġ")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )
