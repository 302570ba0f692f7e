"""`hybridrl watch RUN`: serve the live report of a run or of a folder of runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import tempfile
import webbrowser
from collections.abc import Iterator
from pathlib import Path

from hybridrl.commands.output import print_for_people
from hybridrl.errors import ConfigError
from hybridrl.run_files.run_reader import check_runs

_TOKEN_PATTERN = re.compile(r"[\w-]{16,}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or one with runs")
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="on 127.0.0.1; else any that is free"
    )
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help="with the token of the address, which is made if it is not there: a Prometheus that "
        "scrapes /metrics reads the same file",
    )
    parser.add_argument("--open", action="store_true", help="open it in the browser")


def run(chosen: argparse.Namespace) -> int:
    """Serve the report until Ctrl-C.

    Raises:
        ConfigError: if there is no run, or nothing can be served there.
    """
    folder = Path(chosen.run).expanduser()
    check_runs(folder)
    # It brings torch, which takes seconds; a wrong folder is refused without it.
    from hybridrl.report.report_server import LOOPBACK_HOST, ReportServer, ReportSite

    site = ReportSite(folder)
    token = _read_or_make_token(Path(chosen.token_file).expanduser()) if chosen.token_file else ""
    with ReportServer(site, chosen.port, token) as server:
        print_for_people(
            server.url,
            f"Ctrl-C ends it. From another machine: ssh -L {server.server_port}:{LOOPBACK_HOST}:"
            f"{server.server_port} and this one's name, then the same address there.",
        )
        try:
            with _open_in_browser(server.url) if chosen.open else contextlib.nullcontext():
                server.serve_forever()
        except KeyboardInterrupt:
            print_for_people("")
    return 0


@contextlib.contextmanager
def _open_in_browser(url: str) -> Iterator[None]:
    """Open the page through a temporary file that only this user can read, because all users of the
    machine can read a browser's command line."""
    with tempfile.NamedTemporaryFile("w", prefix="hybridrl-watch-", suffix=".html") as file:
        file.write(f'<meta http-equiv="refresh" content="0; url={url}">\n')
        file.flush()
        webbrowser.open(Path(file.name).as_uri())
        yield


def _read_or_make_token(file: Path) -> str:
    """Read the token of a file, or create the file with a new token, readable only by this user.

    Raises:
        ConfigError: if there is none in it, or it cannot be made.
    """
    try:
        try:
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
                new.write(token := secrets.token_urlsafe(24))
            return token
        except FileExistsError:
            found = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--token-file {file}: {error}. Name one that you can write.") from error
    if not _TOKEN_PATTERN.fullmatch(found):
        raise ConfigError(
            f"--token-file {file} holds no token: 16 letters, digits, - or _ at least. Remove it, "
            "and a new one is made."
        )
    return found
