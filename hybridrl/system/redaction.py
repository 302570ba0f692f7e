"""The secrets that this process knows, and `***` in place of them wherever text leaves it.

A key that is put into a sentence, or that a library puts into its error, is plain text. So every
secret that is read from settings is registered here, and what is printed, logged or written goes
through `redact`. Workers register the secrets of the settings that they are built from.
"""

from __future__ import annotations

import json
import os
import re
import sys
from typing import Any, TextIO
from urllib.parse import quote, unquote

HIDDEN = "***"
"""What is written in place of a secret that was given as it is."""
_SHORTEST = 4
"""Characters of a secret that is looked for in texts: a shorter one is part of many words."""
_LONG = 8
"""Characters of a secret that is found inside of words, too."""
_WORDS = frozenset({"true", "false", "null", "none", "auto", "default"})
_NAME = re.compile(
    r"(?:.*[_\W])?(?:api)?"
    r"(token|authorization|bearer|(key|secret|password|passwd|passphrase|credential)s?)",
    re.I,
)
_OF_TEXT = re.compile(r"(?:.*_)?(bos|eos|pad|unk|sep|cls|mask|stop|start|end)_tokens?", re.I)
_SIGNATURE = re.compile(r"(?:.*[_\W])?sig(nature)?", re.I)
_USER = re.compile(
    r"(?:(?<=://)([^/@\s:]*:)|(?<=http://)|(?<=https://))(?!\$\{|[^/@\s:]*:\$\{)([^/\s'\"]+)(?=@)"
)
"""The user, and the password, of a URL; or a token in their place."""
_QUERY = re.compile(r"(?<=[?&])([\w.-]+=)(?!\$\{)([^&#\s'\",\]}]+)")
ENTRY = re.compile(r"(\b(\w+)['\"]?\s*[:=]\s*)(?!\s*['\"]?\$)([^,{}\n]+)")
"""A name, and its value up to the next comma or brace, in an argument or a file of settings."""
REFERENCE = re.compile(r"\$\{\s*oc\.env\s*:\s*(\w+)[^}]*\}")
"""A variable of the environment in a setting."""

_secrets: set[str] = set()
_pattern: re.Pattern[str] | None = None


def is_secret_name(name: str) -> bool:
    """Return whether a setting or variable of this name holds a secret."""
    return _NAME.fullmatch(name) is not None and _OF_TEXT.fullmatch(name) is None


def without_url_secrets(text: str) -> str:
    """Return the text with `***` for passwords and signatures of the URLs in it."""
    if "://" not in text:
        return text
    text = _USER.sub(lambda found: f"{found[1] or ''}{HIDDEN}", text)
    return _QUERY.sub(lambda m: f"{m[1]}{HIDDEN}" if _signs(m[1]) else m[0], text)


def url_secrets(text: str) -> list[str]:
    """Return the passwords and signatures of the URLs in a text."""
    if "://" not in text:
        return []
    queries = (found[2] for found in _QUERY.finditer(text) if _signs(found[1]))
    return [*(found[2] for found in _USER.finditer(text)), *queries]


def _signs(name: str) -> bool:
    name = name.removesuffix("=")
    return is_secret_name(name) or _SIGNATURE.fullmatch(name) is not None


def register_secret(text: str) -> None:
    """Have `redact` hide this text, as it is and as URLs, JSON and Python's `repr` write it."""
    global _pattern
    text = text.strip()
    if len(text) < _SHORTEST or text.lower() in _WORDS or HIDDEN in text or text in _secrets:
        return
    _secrets.add(text)
    kind, _, rest = text.partition(" ")
    if kind.lower() in ("bearer", "basic", "token"):  # the value of a header
        register_secret(rest)
    written = {s for one in _secrets for s in (one, quote(one, ""), unquote(one))}
    written |= {s[1:-1] for one in _secrets for s in (json.dumps(one), repr(one))}
    shown = sorted((s for s in written if len(s) >= _SHORTEST), key=len, reverse=True)
    _pattern = re.compile(
        "|".join(
            re.escape(s) if len(s) >= _LONG else rf"(?<![^\W_]){re.escape(s)}(?![^\W_])"
            for s in shown
        )
    )


def register_url(text: str) -> None:
    """Have `redact` hide the passwords and signatures of the URLs in a text."""
    for secret in url_secrets(text):
        register_secret(secret)


def register_secrets(said: str) -> None:
    """Have errors and logs hide the secrets in what a user wrote, an argument of the command line
    or a file of settings, whether or not it can be read as settings."""
    register_url(said)
    for line in said.splitlines():
        key, equals, value = line.partition("=")
        whole = [(key.rpartition(".")[2], value)] if equals and not value.startswith("{") else []
        for name, entry in [*whole, *((m[2], m[3]) for m in ENTRY.finditer(line))]:
            if is_secret_name(name) and not REFERENCE.search(entry):
                register_secret(entry.partition(" #")[0].strip(" '\"[]"))
        for found in REFERENCE.finditer(line):
            before, value = line[: found.start()], os.environ.get(found[1], "")
            named = re.findall(r"\w+(?=['\"]?\s*[:=])", before)[-1:]
            register_url(value)
            if any(map(is_secret_name, [found[1], *named])) or url_secrets(f"{before}x@"):
                register_secret(value)


def redact(text: str) -> str:
    """Return the text with `***` in place of every secret that is registered in this process."""
    return text if _pattern is None else _pattern.sub(HIDDEN, text)


class RedactedStream:
    """A text stream that writes `***` in place of secrets."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without secrets; return its length."""
        self._stream.write(redact(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def redact_output() -> None:
    """Have all that this process prints go through `redact`: errors that nobody catches and log
    records, too. For programs; not for a process that is somebody else's."""
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is not None and not isinstance(stream, RedactedStream):
            setattr(sys, name, RedactedStream(stream))


def escape_unencodable(text: str, encoding: str) -> str:
    r"""`text` with what `encoding` cannot say written as \uXXXX, so that printing cannot fail."""
    return text.encode(encoding, "backslashreplace").decode(encoding)
