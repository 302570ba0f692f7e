"""`hybridrl cache`: list the entries that runs with `cache.use` share, and prune them."""

from __future__ import annotations

import argparse
from collections import Counter

from rich.table import Table

from hybridrl.commands.output import print_for_people
from hybridrl.config.schema import CacheConfig
from hybridrl.system.content_cache import (
    ContentCache,
    find_cache_folder,
    list_segments,
    prune_segments,
)
from hybridrl.system.storage import explain_write_errors


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="as cache.folder; without it the default folder")
    parser.add_argument(
        "--prune",
        type=float,
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
            prune_segments(folder, chosen.prune * 2**30)
    sizes = Counter[str]()
    for path, stat in list_segments(folder):
        sizes[path.parent.name] += stat.st_size
    table = Table("kind", "entries", "MiB")
    for kind, size in sizes.items():
        table.add_row(kind, f"{ContentCache(config, kind).index():,}", f"{size / 2**20:,.1f}")
    return print_for_people(f"{folder}:", table)
