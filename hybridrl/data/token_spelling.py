"""TokenSpelling: the bytes of text that each token of a tokenizer stands for."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from hybridrl.conversations.rendering import special_tokens
from hybridrl.conversations.turn_ends import closing_token
from hybridrl.data.encoding import find_end_token
from hybridrl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_TOKEN = -1


class TokenSpelling:
    """The bytes of the tokens of one tokenizer.

    Attributes:
        end: The token that ends a response.
        control: Control tokens, by name.

    Raises:
        ConfigError: for a tokenizer whose tokens are no pieces of text, such as WordPiece.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        self.tokenizer = tokenizer
        closing = closing_token(tokenizer)
        self.end = find_end_token(tokenizer) if closing is None else closing
        added = tokenizer.added_tokens_decoder
        vocabulary, special = tokenizer.get_vocab(), special_tokens(tokenizer)
        self.control = {name: vocabulary[name] for name in special if name in vocabulary}
        plain = {token.content for token in added.values()} - self.control.keys()
        alphabet: dict[str, int] = {}
        if _is_byte_level(tokenizer):
            alphabet = {character: byte for byte, character in bytes_to_unicode().items()}
        self._bytes: dict[int, bytes] = {}
        self._ids: dict[bytes, int] = {}
        # Last those that stand for a byte of a character that has a token of its own, perhaps.
        for token, number in sorted(vocabulary.items(), key=lambda t: (_is_byte(t[0]), t[1])):
            if token in self.control:
                continue
            if token in plain or (alphabet and not alphabet.keys() >= set(token)):
                spelled = token.encode()
            elif alphabet:
                spelled = bytes(alphabet[c] for c in token)
            elif _is_byte(token):
                spelled = bytes([int(token[3:5], 16)])
            else:
                spelled = token.replace("▁", " ").encode()
            self._bytes[number] = spelled
            self._ids.setdefault(spelled, number)
        self._longest = max(map(len, self._ids), default=0)

    def spell(self, token: int) -> bytes | None:
        """Return the bytes of a token; None if it is a control token, or none."""
        return self._bytes.get(token)

    def first_token(self, text: bytes) -> int:
        """Return the longest token that the bytes begin with; `NO_TOKEN` if there is none."""
        for length in range(min(len(text), self._longest), 0, -1):
            if (found := self._ids.get(text[:length])) is not None:
                return found
        return NO_TOKEN


def _is_byte(token: str) -> bool:
    return len(token) == 6 and token.startswith("<0x") and token.endswith(">")


def _is_byte_level(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether tokens are spelled in the byte alphabet; otherwise a space is `▁`."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decoder = "" if backend is None else json.dumps(json.loads(backend.to_str())["decoder"])
    if "ByteLevel" in decoder:
        return True
    if "▁" in decoder.encode().decode("unicode_escape") or "Metaspace" in decoder:
        return False
    raise ConfigError(
        f"distillation.alignment=bytes: the tokens of the tokenizer `{tokenizer.name_or_path}` are "
        "no pieces of text that can be put together again: it is neither byte-level BPE nor of the "
        "SentencePiece kind. Take models with such tokenizers."
    )
