"""Which layers of a model lie in which stage of a pipeline.

A pipeline of `ranks` ranks with `chunks` chunks each has `ranks * chunks` stages. Stage s lies on
rank `s % ranks` as its chunk `s // ranks`: with more than one chunk a sample passes every rank
several times, which makes the pipeline's idle time shorter (interleaving).
"""

from __future__ import annotations

import itertools

from hybridrl.errors import ConfigError


def split_layers(layers: int, stages: int) -> list[range]:
    """Consecutive layers for each stage, as even as possible.

    What does not divide goes to earlier stages: the last one also has the output head.
    """
    edges = [-(-layers * stage // stages) for stage in range(stages + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(edges)]


def check_stages(layers: int, ranks: int, chunks: int = 1, setting: str = "parallel.pp") -> None:
    """Refuses a pipeline that the model is too short for, before anything starts.

    Args:
        layers: Decoder layers of the model.
        ranks: Size of the `pp` axis.
        chunks: Stages on each rank.
        setting: Name of the setting that gave `ranks`.

    Raises:
        ConfigError: naming the setting and the largest value that works.
    """
    if ranks < 1 or chunks < 1:
        raise ConfigError(
            f"{setting}={ranks} with {chunks} chunks on each rank: both must be at least 1."
        )
    if ranks * chunks > layers:
        most = max(1, layers // chunks)
        each = f", {chunks} on each rank," if chunks > 1 else ""
        raise ConfigError(
            f"{setting}={ranks} cuts the model into {ranks * chunks} stages{each} but it has only "
            f"{layers} layers, and every stage needs one. Choose {setting}={most} or less"
            f"{', or fewer chunks' if chunks > 1 else ''}."
        )
