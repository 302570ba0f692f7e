"""Calls in daemon threads, which may hang without keeping the process from ending."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class DaemonThreads(ThreadPoolExecutor):
    """An executor with one daemon thread for each call. The threads of an ordinary pool are waited
    for when the process ends, and a call that hangs in one would keep it from ending."""

    def submit(
        self,
        function: Callable[_Parameters, _Result],
        /,
        *args: _Parameters.args,
        **keywords: _Parameters.kwargs,
    ) -> Future[_Result]:
        future: Future[_Result] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(*args, **keywords))
            except BaseException as error:
                future.set_exception(error)

        threading.Thread(target=run, name="daemon call", daemon=True).start()
        return future
