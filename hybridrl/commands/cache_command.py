"""`hybridrl cache`: list the values and the token ids that runs share, and prune them."""

from __future__ import annotations

import argparse
import contextlib
import math
from collections import Counter
from pathlib import Path

from rich.table import Table

from hybridrl.commands.output import print_for_people
from hybridrl.config.schema import CacheConfig
from hybridrl.system.content_cache import (
    ContentCache,
    find_cache_folder,
    list_segments,
    remove_oldest,
)
from hybridrl.system.row_folders import KIND, list_row_folders, remove_unused_folders
from hybridrl.system.storage import explain_write_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="as cache.folder; without it the default folder")
    parser.add_argument(
        "--prune",
        type=_parse_gib,
        metavar="GIB",
        help="remove the oldest entries until the others take so much; 0: all",
    )


def run(chosen: argparse.Namespace) -> int:
    """Prune the cache if asked, and list its kinds.

    Raises:
        StorageError: if entries cannot be removed.
    """
    config = CacheConfig(folder=chosen.folder)
    folder = find_cache_folder(config)
    if chosen.prune is not None:
        with explain_write_errors(folder, "--folder"):
            _prune(folder, chosen.prune * 2**30)
    sizes = Counter[str]()
    for path, stat in list_segments(folder):
        sizes[path.parent.name] += stat.st_size
    table = Table("kind", "entries", "MiB")
    for kind, size in sizes.items():
        table.add_row(kind, f"{ContentCache(config, kind).index():,}", f"{size / 2**20:,.1f}")
    if row_folders := list_row_folders(folder):
        size = sum(one.size for one in row_folders)
        table.add_row(KIND, f"{len(row_folders):,}", f"{size / 2**20:,.1f}")
    return print_for_people(f"{folder}:", table)


def _parse_gib(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(
        f"{text} is not a size in GiB. Give a number such as 2, or 0 to remove all entries."
    )


def _prune(folder: Path, max_bytes: float) -> None:
    """Remove what was written, or of token ids opened, the longest ago, until the rest takes at
    most `max_bytes`."""
    remove_unused_folders(folder)
    oldest = [(stat.st_mtime_ns, path, stat.st_size) for path, stat in list_segments(folder)]
    oldest += [(one.opened, one.path, one.size) for one in list_row_folders(folder)]
    oldest.sort(key=lambda one: (one[0], one[1].name))
    remove_oldest([(path, size) for _, path, size in oldest], max_bytes)
