"""A program in any language plays each episode: it is run as it is, and told of the model by
environment variables."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import tempfile
from pathlib import Path
from typing import Any

from .episode import MODEL, BaseAdapter, Episode, EpisodeError, Returned, Score, SetupError

_LONGEST = 1 << 20
"""Bytes of its standard output that are kept, and of its errors: what comes last."""
_MOST = 16 << 20
"""Bytes that a program may write."""
_LINGER_S = 5.0
"""So long what a program wrote is waited for when it has ended: others may hold its pipes."""


class Adapter(BaseAdapter):
    """Options: `command`, a list of words or a line for the shell's rules of quoting; `cwd`.

    The program finds the row as JSON in its standard input, and in the variable HYBRIDRL_ROW if it
    is short; the model at OPENAI_BASE_URL, with OPENAI_API_KEY, by the name HYBRIDRL_MODEL. Its
    reward is what it posts to HYBRIDRL_REWARD_URL (`{"reward": 1.0}`, with the same key); else the
    last line of its standard output, if that is a number. A program that ends with status 0 and
    reports no reward gets 0. Any other end is a failure.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        own = self.take({"command": None, "cwd": None})
        command = own["command"]
        self._command = shlex.split(command) if isinstance(command, str) else command
        is_list = isinstance(self._command, list) and self._command
        if not is_list or not all(isinstance(word, str) for word in self._command):
            raise SetupError(
                f"environment.options.command={command!r}: must be the program to run and its "
                "arguments, such as [python, agent.py]."
            )
        if shutil.which(self._command[0], path=None) is None:
            raise SetupError(
                f"environment.options.command={command!r}: there is no program "
                f"`{self._command[0]}`."
            )
        self._cwd = own["cwd"]
        if self._cwd is not None and not Path(self._cwd).is_dir():
            raise SetupError(f"environment.options.cwd={self._cwd}: there is no such folder.")

    async def play(self, episode: Episode) -> Returned:
        row = json.dumps(episode.row)
        told = {
            "OPENAI_BASE_URL": episode.url,
            "OPENAI_API_KEY": episode.token,
            "HYBRIDRL_MODEL": MODEL,
            "HYBRIDRL_SESSION": episode.session,
            "HYBRIDRL_REWARD_URL": f"{episode.url.removesuffix('/v1')}/reward",
        }
        if len(row) < 1 << 16:  # Linux takes no variable longer than twice that
            told["HYBRIDRL_ROW"] = row
        output, errors = _Output(), _Output()
        try:
            with tempfile.TemporaryFile() as file:
                file.write(row.encode())
                file.seek(0)
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    stdin=file,
                    stdout=await output.open(),
                    stderr=await errors.open(),
                    cwd=self._cwd,
                    env={**os.environ, **told},
                    start_new_session=True,
                )
            try:
                ended = asyncio.ensure_future(process.wait())
                floods = [asyncio.ensure_future(one.flood.wait()) for one in (output, errors)]
                await asyncio.wait({ended, *floods}, return_when=asyncio.FIRST_COMPLETED)
                for waiting in floods:
                    waiting.cancel()
            finally:
                _kill(process.pid)  # and what it has left behind, which may hold its pipes open
                status = await process.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(output.read(), errors.read()), _LINGER_S)
        finally:
            output.close()
            errors.close()
        for one in (output, errors):
            if one.flood.is_set():
                raise EpisodeError(
                    f"The program wrote more than {_MOST >> 20} MiB and was stopped. It ends in:\n"
                    f"{_tail(one.text)}",
                    "output",
                )
        if status != 0:
            raise EpisodeError(
                f"The program {_how_it_ended(status)}.\n{_tail(errors.text or output.text)}"
            )
        # Without a number the endpoint may have been told, which is known there.
        return Score(_number(output.text))


def _kill(group: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


class _Output:
    """A pipe that a program writes to.

    Attributes:
        flood: Set when it has written more than it may.
    """

    def __init__(self) -> None:
        self.flood = asyncio.Event()
        self._kept = bytearray()
        self._stream = asyncio.StreamReader()
        self._transport: Any = None

    async def open(self) -> Any:
        """The end for the program, which has to be closed here by `read` or `close`."""
        source, self._sink = os.pipe()
        protocol = asyncio.StreamReaderProtocol(self._stream)
        loop = asyncio.get_running_loop()
        pipe = os.fdopen(source, "rb")
        self._transport, _ = await loop.connect_read_pipe(lambda: protocol, pipe)
        self._reading = loop.create_task(self._read())
        return self._sink

    async def _read(self) -> None:
        length = 0
        while piece := await self._stream.read(1 << 16):
            self._kept += piece
            length += len(piece)
            del self._kept[:-_LONGEST]
            if length > _MOST:
                self.flood.set()
                return

    async def read(self) -> None:
        """Waits for the end of what was written."""
        os.close(self._sink)
        self._sink = -1
        await self._reading

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
            self._reading.cancel()
            if self._sink >= 0:
                os.close(self._sink)

    @property
    def text(self) -> str:
        return self._kept.decode("utf-8", "replace")


def _number(output: str) -> float | None:
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        return float(last)
    except ValueError:
        return None


def _how_it_ended(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _tail(text: str) -> str:
    return text.strip()[-2000:] or "It wrote nothing."
