"""The adapter `command`: a program in any language plays each episode; environment variables tell
it where the model is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from .environment_adapter import (
    MODEL_NAME,
    AdapterEpisode,
    EnvironmentAdapter,
    EnvironmentSetupError,
    EpisodeError,
    EpisodeReturn,
    EpisodeScore,
)

_KEPT_OUTPUT_BYTES = 1 << 20
"""Bytes of its standard output that are kept, and of its errors: what comes last."""
_MAX_OUTPUT_BYTES = 16 << 20
"""Bytes that a program may write."""
_LAUNCHER = str(Path(__file__).resolve().parents[2] / "processes" / "launcher.py")
_LINGER_S = 5.0
"""So long what a program wrote is waited for when it has ended: others may hold its pipes."""


class Adapter(EnvironmentAdapter):
    """Options: `command`, a list of words or a line for the shell's rules of quoting; `cwd`;
    `report` and `isolate`, true or false.

    The program finds the row as JSON in its standard input, without `environment.hidden_columns`;
    the model at OPENAI_BASE_URL, with OPENAI_API_KEY, by the name HYBRIDRL_MODEL. Its reward is the
    last line of its standard output, if that is a number. With `report` it is what the program
    posts instead (`{"reward": 1.0}`): the row has an entry `hybridrl` with `reward_url` and
    `token`, which are told nowhere else. A program that ends with status 0 and reports no reward
    gets 0. Any other end is a failure. What it has started is ended with it.

    With `isolate` neither the program nor what it starts can read, trace or signal other processes.
    """

    def __init__(self, options: dict[str, Any], name: str) -> None:
        super().__init__(options, name)
        own = self.take({"command": None, "cwd": None, "report": False, "isolate": False})
        command = own["command"]
        self._command = shlex.split(command) if isinstance(command, str) else command
        is_list = isinstance(self._command, list) and self._command
        if not is_list or not all(isinstance(word, str) for word in self._command):
            raise EnvironmentSetupError(
                f"environment.options.command={command!r}: must be the program to run and its "
                "arguments, such as [python, agent.py]."
            )
        if shutil.which(self._command[0], path=None) is None:
            raise EnvironmentSetupError(
                f"environment.options.command={command!r}: there is no program "
                f"`{self._command[0]}`."
            )
        self._cwd = own["cwd"]
        if self._cwd is not None and not Path(self._cwd).is_dir():
            raise EnvironmentSetupError(
                f"environment.options.cwd={self._cwd}: there is no such folder."
            )
        for option in ("report", "isolate"):
            if not isinstance(own[option], bool):
                raise EnvironmentSetupError(
                    f"environment.options.{option}={own[option]}: true or false."
                )
        self._reports, self._isolates = own["report"], own["isolate"]
        asking = [sys.executable, "-IS", _LAUNCHER, "can-isolate"]
        if self._isolates and subprocess.run(asking).returncode != 0:
            raise EnvironmentSetupError(
                "environment.options.isolate=true needs a Landlock that knows scopes: Linux 6.12 "
                "or later. Here only another user or a container keeps programs apart."
            )

    async def play(self, episode: AdapterEpisode) -> EpisodeReturn:
        row = episode.row
        if self._reports:
            url = f"{episode.url.removesuffix('/v1')}/reward"
            row = {**row, "hybridrl": {"reward_url": url, "token": episode.report_token}}
        settings = {"parent": os.getpid(), "isolated": self._isolates, "prints": not self._reports}
        told = {
            "OPENAI_BASE_URL": episode.url,
            "OPENAI_API_KEY": episode.token,
            "HYBRIDRL_MODEL": MODEL_NAME,
            "HYBRIDRL_SESSION": episode.session,
        }
        variables = {**os.environ, **told}
        output, errors, given = _OutputPipe(), _OutputPipe(), _Input(json.dumps(row).encode())
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-IS", _LAUNCHER, json.dumps(settings)),
                *self._command,
                stdin=await given.open(),
                stdout=await output.open(),
                stderr=await errors.open(),
                cwd=self._cwd,
                env=variables,
                start_new_session=True,
            )
            given.release()
            try:
                ended = asyncio.ensure_future(process.wait())
                floods = [asyncio.ensure_future(one.flood.wait()) for one in (output, errors)]
                await asyncio.wait({ended, *floods}, return_when=asyncio.FIRST_COMPLETED)
                for waiting in floods:
                    waiting.cancel()
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()  # which ends what is left of the program first
                status = await process.wait()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.gather(output.read(), errors.read()), _LINGER_S)
        finally:
            for pipe in (given, output, errors):
                pipe.close()
        for one in (output, errors):
            if one.flood.is_set():
                raise EpisodeError(
                    f"The program wrote more than {_MAX_OUTPUT_BYTES >> 20} MiB and was stopped. "
                    f"It ends in:\n{_format_tail(one.text)}",
                    "output",
                )
        if status != 0:
            raise EpisodeError(
                f"The program {_describe_end(status)}.\n{_format_tail(errors.text or output.text)}"
            )
        # Without a number the endpoint may have been told, which is known there.
        return EpisodeScore(None if self._reports else _parse_final_number(output.text))


class _Input:
    """A pipe from which a program reads: once it has, nobody else can."""

    def __init__(self, content: bytes) -> None:
        self._content = content

    async def open(self) -> int:
        """The end for the program, which has to be closed here by `release`."""
        self._source, sink = os.pipe()
        loop, pipe = asyncio.get_running_loop(), os.fdopen(sink, "wb")
        self._transport, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, pipe)
        return self._source

    def release(self) -> None:
        """The program has it: writes what fits now, and the rest as it reads."""
        os.close(self._source)
        self._source = -1
        self._transport.write(self._content)
        self._transport.write_eof()

    def close(self) -> None:
        if not self._transport.is_closing():  # or it ends with the last of who reads
            self._transport.abort()
        if self._source >= 0:
            os.close(self._source)


class _OutputPipe:
    """A pipe that a program writes to, limited in length.

    Attributes:
        flood: Set when it has written more than it may.
    """

    def __init__(self) -> None:
        self.flood = asyncio.Event()
        self._kept = bytearray()
        self._stream = asyncio.StreamReader()
        self._transport: Any = None

    async def open(self) -> Any:
        """Return the program's end of the pipe; `read` or `close` closes it here."""
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
            del self._kept[:-_KEPT_OUTPUT_BYTES]
            if length > _MAX_OUTPUT_BYTES:
                self.flood.set()
                return

    async def read(self) -> None:
        """Wait until everything that was written has been read."""
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


def _parse_final_number(output: str) -> float | None:
    lines = output.split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        return float(last)
    except ValueError:
        return None


def _describe_end(status: int) -> str:
    if status < 0:
        return f"was ended by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def _format_tail(text: str) -> str:
    return text.strip()[-2000:] or "It wrote nothing."
