"""The limit of files that a process may open."""

from __future__ import annotations

import resource

from hybridrl.errors import ConfigError

MIN_OPEN_FILES = 256
"""With so many a job with Ray was seen to run."""


def check_open_files() -> None:
    """Refuse a limit below what a job needs, because the errors of Ray and vLLM name neither the
    limit nor the cure.

    Raises:
        ConfigError: if there may be fewer than a job needs.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= limit < MIN_OPEN_FILES:
        can = limit < most or most < 0  # the shell may raise it as far as that
        raise ConfigError(
            f"A process may open {limit} files here (ulimit -n), and a job needs "
            f"{MIN_OPEN_FILES} or more. Write `ulimit -n 4096` before the command"
            f"{'' if can else ', as far as whoever set the limit lets you (ulimit -Hn)'}."
        )
