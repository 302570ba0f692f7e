"""The live report server: bound to this machine, protected by a token.

    http://127.0.0.1:<port>/<token>/                    a run, or a table of the runs of a folder
                                   /runs/<a>,<b>/       run a, with b beside it
                                   /metrics             for Prometheus

A page asks for `versions`, and then for each `part/<name>` that is new. Nothing is written, and
nothing but the files of runs is read.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import math
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from hybridrl.errors import ConfigError
from hybridrl.report import prometheus_metrics as prometheus
from hybridrl.report.html_page import (
    RUN_SCRIPTS,
    RUN_TABLE_SCRIPTS,
    build_security_policy,
    render_report_page,
    render_run_table_page,
)
from hybridrl.report.live_report import CachedPart, LiveReport
from hybridrl.report.report_content import ReportContent
from hybridrl.report.run_table import RunTable
from hybridrl.run_files.run_reader import RunReader, check_runs, is_run_folder, list_runs
from hybridrl.run_files.run_status import RUNNING, read_run_status

LOOPBACK_HOST = "127.0.0.1"
_REQUEST_TIMEOUT_S = 10.0
"""So long a browser may take for a request."""
MOST_OPEN = 64
"""Connections; one more ends the one that was opened first."""
_HTML, _JSON = "text/html; charset=utf-8", "application/json"


class ReportSite:
    """The runs that a server shows: one run, or the runs of a folder.

    Args:
        path: The folder.

    Raises:
        ConfigError: if it is neither a run's nor one with runs.
    """

    def __init__(self, path: Path) -> None:
        self.run = RunReader(path) if is_run_folder(path) else None
        check_runs(path)
        self.runs = RunTable(path.resolve())
        self._watched: dict[str, LiveReport] = {}
        self._readers: dict[Path, RunReader] = {}
        self._lock = threading.Lock()

    def page(self, names: str) -> str | None:
        """Render the page of the named runs; with no names that of the site's run or the run table.
        None if a run does not exist."""
        if not names and self.run is None:
            return render_run_table_page(f"{self.runs.folder.name}: runs")
        watched = self.watched(names)
        return None if watched is None else render_report_page(watched.name, {}, live=True)

    def parts(self, names: str) -> Mapping[str, CachedPart] | None:
        """Return the live parts of the same page, by name; None if a run does not exist."""
        if not names and self.run is None:
            return {"runs": self.runs.part}
        watched = self.watched(names)
        return None if watched is None else watched.parts

    def watched(self, names: str) -> LiveReport | None:
        """Return the live report of the first named run with the others beside it. Names are
        separated by commas."""
        with self._lock:
            if names not in self._watched:
                whole = self.runs.named(names) if names else self.run  # a name may have commas
                runs = [whole] if whole else [self.runs.named(name) for name in names.split(",")]
                if None in runs or (names and self.run is not None):
                    return None
                found = [run for run in runs if run is not None]
                self._watched[names] = LiveReport(ReportContent(found[0], found[1:]))
            return self._watched[names]

    def metrics(self) -> str:
        """Render Prometheus metrics of the run, or of all running runs of the folder."""
        if self.run is not None:
            folders = [self.run.path]
        else:
            everything = list_runs(self.runs.folder)
            folders = [folder for folder in everything if read_run_status(folder)[0] == RUNNING]
        with self._lock:
            self._readers = {one: self._readers.get(one) or RunReader(one) for one in folders}
            return prometheus.render_prometheus_metrics(
                {one: run.rows() for one, run in self._readers.items()}
            )


class ReportServer(ThreadingHTTPServer):
    """A threaded HTTP server of reports that listens as soon as it is constructed.

    Args:
        port: 0: any that is free.
        token: What its addresses begin with; empty: a new one.

    Raises:
        ConfigError: if the port is taken, or may not be used.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, site: ReportSite, port: int = 0, token: str = "") -> None:
        self.site = site
        self.token = token or secrets.token_urlsafe(24)
        self._open: dict[socket.socket, float] = {}  # and when they are ended, unless they ask
        try:
            super().__init__((LOOPBACK_HOST, port), _ReportRequestHandler)
        except OSError as error:
            why = "is taken by another program" if error.errno == errno.EADDRINUSE else str(error)
            raise ConfigError(
                f"--port {port} {why}. Name another one, or 0 for any that is free."
            ) from error
        except OverflowError as error:
            raise ConfigError(f"--port {port}: must be a number from 0 to 65535.") from error

    @property
    def url(self) -> str:
        """The address of the page, with its token."""
        return f"http://{LOOPBACK_HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers in a thread of its own, as long as there are few."""
        if len(self._open) >= MOST_OPEN:
            self._end(next(iter(self._open), None))
        self._open[request] = time.monotonic() + _REQUEST_TIMEOUT_S
        super().process_request(request, client_address)

    def keep(self, request: Any, patience_s: float = _REQUEST_TIMEOUT_S) -> None:
        """It has shown the token: its time begins anew."""
        if request in self._open:
            self._open[request] = time.monotonic() + patience_s

    def service_actions(self) -> None:
        """Ends those that have sent a head too slowly."""
        now = time.monotonic()
        for request in [one for one, until in list(self._open.items()) if until < now]:
            self._end(request)

    def shutdown_request(self, request: Any) -> None:
        """Closes a connection."""
        self._open.pop(request, None)
        super().shutdown_request(request)

    def _end(self, request: Any) -> None:
        if self._open.pop(request, None) is not None:
            with contextlib.suppress(OSError):  # its thread closes it
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connection errors of browsers; other errors were answered with status 500."""


class _ReportRequestHandler(BaseHTTPRequestHandler):
    server: ReportServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "hybridrl", ""
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer a request for a page, one of its parts, or the metrics."""
        # A page of another site that a name leads here (DNS rebinding) brings the other's name. The
        # port may be another one: that of a tunnel.
        if self.headers.get("Host", "").partition(":")[0] not in (LOOPBACK_HOST, "localhost"):
            self._refuse(HTTPStatus.FORBIDDEN)
            return
        path = [unquote(part) for part in urlsplit(self.path).path.split("/")[1:]]
        if path == ["metrics"] and self._is_token(self._bearer()):
            path.insert(0, "")
        elif not path or not self._is_token(path[0]):
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        elif len(path) == 1:
            to = {"Location": f"/{path[0]}/"}
            self._answer(b"", _HTML, HTTPStatus.MOVED_PERMANENTLY, to)
            return
        self.server.keep(self.connection, math.inf)  # as long as the answer takes
        try:
            self._route(path[1:])
        except ConnectionError:
            raise
        except Exception as error:  # such as a file that is being replaced: asked for again soon
            said = f"{type(error).__name__}: {error}".encode(errors="replace")
            self._answer(said, "text/plain; charset=utf-8", HTTPStatus.INTERNAL_SERVER_ERROR)
        self.server.keep(self.connection)

    def _route(self, path: list[str]) -> None:
        names = ""
        if path[0] == "runs" and len(path) > 2:
            names, path = path[1], path[2:]
        site = self.server.site
        match path:
            case [""] if (text := site.page(names)) is not None:
                scripts = RUN_TABLE_SCRIPTS if not names and site.run is None else RUN_SCRIPTS
                policy = f"{build_security_policy(scripts)}; frame-ancestors 'none'"
                headers = {"Content-Security-Policy": policy}
                self._answer(text.encode(), _HTML, headers=headers)
            case ["metrics"] if not names:
                self._answer(site.metrics().encode(), prometheus.CONTENT_TYPE)
            case ["versions"] if (found := site.parts(names)) is not None:
                versions = {name: part.version() for name, part in found.items()}
                self._answer(json.dumps(versions).encode(), _JSON)
            case ["part", name] if name in (found := site.parts(names) or {}):
                self._answer(found[name].text().encode(), _JSON)
            case _:
                self._refuse(HTTPStatus.NOT_FOUND)

    def _bearer(self) -> str:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else ""

    def _is_token(self, said: str) -> bool:
        return hmac.compare_digest(said.encode(errors="replace"), self.server.token.encode())

    def _refuse(self, status: HTTPStatus) -> None:
        self._answer(f"{status.phrase}\n".encode(), "text/plain; charset=utf-8", status)

    def _answer(
        self,
        content: bytes,
        kind: str,
        status: HTTPStatus = HTTPStatus.OK,
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(status)
        always = {
            "Content-Type": kind,
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
        }
        for name, value in {**always, **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing, because addresses contain the token."""
