"""A prompt for the teacher alone, for example with the reference answer in it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hybridrl.errors import ConfigError

_PLACEHOLDER = r"\{(\w+)\}"


class TeacherPrompt(NamedTuple):
    """The template `distillation.teacher_prompt`.

    Attributes:
        text: With `{names}` of columns.
        columns: Those names.
    """

    text: str
    columns: list[str]

    @classmethod
    def read(cls, path: str | None) -> TeacherPrompt | None:
        """Load the template from a file; None if `path` is None.

        Raises:
            ConfigError: if it cannot be read, or does not name the prompt.
        """
        if path is None:
            return None
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"distillation.teacher_prompt={path} could not be read: {error}."
            ) from error
        names = list(dict.fromkeys(re.findall(_PLACEHOLDER, text)))
        if "prompt" not in names:
            raise ConfigError(
                f"distillation.teacher_prompt={path} has no {{prompt}} in it, so a teacher would "
                "not know what was asked. Write it where the prompt is to stand."
            )
        return cls(text, names)

    def encoded(self, row: Mapping[str, Any], tokenizer: Any) -> list[int]:
        """Return the tokens of the prompt for a row. A rendered chat contains its special tokens;
        other texts get the tokenizer's."""
        # Not str.format: a brace in a prompt is a brace.
        text = re.sub(_PLACEHOLDER, lambda found: str(row[found[1]]), self.text)
        begins = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return list(tokenizer(text, add_special_tokens=not begins)["input_ids"])
