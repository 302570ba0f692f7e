"""Token ids of large data, made once by several processes and kept in files that later jobs map.

An entry of the cache is a folder, named by a hash of all that its rows depend on: the files' bytes,
the settings, the tokenizer with its chat template, and the versions of the code. It holds
`rows.arrow`, the blocks one after the other, each an Arrow stream, and `entry.json`: a checksum
over the name and what follows, where the blocks lie, in order, and what there is to say of the
rows. A job fills a folder of its own and renames it when it is complete; of two that do so at once,
the second takes the first one's.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import json
import logging
import math
import os
import pickle
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import pyarrow as pa

from hybridrl import batch, conversations, data
from hybridrl.batch.batch import Batch
from hybridrl.config.schema import CacheConfig
from hybridrl.conversations.rendering import template_sources
from hybridrl.data.block_program import RowRecipe
from hybridrl.data.row_blocks import BLOCK_BYTES, RowBlock, WholeTableError, iterate_blocks
from hybridrl.data.supervised_tokens import CONVERSATION
from hybridrl.data.table_columns import without_mixed_columns
from hybridrl.errors import DataError, HybridRLError
from hybridrl.processes.pool import ItemResult, ProcessPool, ProcessStartError, WorkItem
from hybridrl.processes.supervised_process import ProcessSpec
from hybridrl.system.bounded_files import parse_json, read_text
from hybridrl.system.container_limits import count_usable_cores
from hybridrl.system.content_cache import ContentCache, find_cache_folder
from hybridrl.system.row_folders import KIND, ROWS, create_part, remove_unused_folders
from hybridrl.system.secret_variables import without_secrets
from hybridrl.system.storage import explain_write_errors

ENTRY = "entry.json"
_OF_NO_ROW = {
    *("task", "tasks", "task_options", "rows", "path", "sources", "eval_path", "eval_split"),
    *("prompts_per_step", "shuffle", "order", "max_shuffle_error", "sampler", "sampler_options"),
    *("date", "bad_rows", "bad_rows_limit"),
}
"""Settings of the data that change no token of a row: the files are known by what they hold, and
the date counts only where the chat template asks for it."""
_PACKAGES = ("pyarrow", "transformers", "tokenizers", "jinja2")
_TICK_S = 1.0
_MOST_ENTRY = 4 << 30
_MOST_WAITING = 8
"""Blocks that are read before a process is free for them."""

_user: ContextVar[tuple[CacheConfig, Callable[..., None]]] = ContextVar("user of the cache")
_log = logging.getLogger(__name__)


@contextmanager
def used_by(config: CacheConfig, progress: Callable[..., None]) -> Iterator[None]:
    """Within the context, keep token ids in the folder of `config`, and tell `progress` how far
    they are: a text, and how much is done of how much. What it raises ends it."""
    token = _user.set((config, progress))
    try:
        yield
    finally:
        _user.reset(token)


def load_token_rows(recipe: RowRecipe, found: Any, size: int, tokenizer: Any) -> Batch | None:
    """Return the tokenized rows of large data, mapped from the cache, which is filled first if it
    has none of them. Their keys (`hybridrl.data.row_keys`) are among the columns.

    Args:
        found: Files, or a `datasets.Dataset`.
        size: Of all rows, roughly.

    Returns:
        None for rows that have to be read in one table.

    Raises:
        DataError, ConfigError: as `recipe.make`.
        StorageError: if the cache cannot be written.
    """
    config, progress = _user.get((CacheConfig(), lambda *_: None))
    cache = find_cache_folder(config) / KIND
    files = found if isinstance(found, list) else []
    stamps = list(map(_read_stamp, files))
    hashes = ContentCache(config, "files")
    content = [_hash_file(hashes, file, progress) for file in files] or found._fingerprint
    folder = cache / _compute_key(recipe, tokenizer, content)
    with explain_write_errors(cache, "cache.folder"):
        remove_unused_folders(cache.parent)
        if (entry := _check_entry(folder)) is None:
            cache.mkdir(parents=True, exist_ok=True)
            with create_part(cache) as (part, rows):
                try:
                    entry = _fill(rows, recipe, found, size, tokenizer, progress)
                except WholeTableError:
                    return None
                if stamps != list(map(_read_stamp, files)):
                    raise DataError(f"{recipe.place} has changed while it was read. Start again.")
                text = json.dumps(entry)
                (part / ENTRY).write_text(f"{_sign(folder.name, text)}\n{text}")
                try:
                    part.rename(folder)
                except OSError:  # another job was here first
                    if (entry := _check_entry(folder)) is None:
                        raise
    with contextlib.suppress(OSError):  # it may be another user's
        os.utime(folder)
    return _open_rows(folder / ROWS, entry["blocks"], recipe)


def _compute_key(recipe: RowRecipe, tokenizer: Any, content: Any) -> str:
    """Return the hash of all that token ids depend on, and what is said of the rows.

    Args:
        content: By which the content of files is known.
    """
    settings = {k: v for k, v in asdict(recipe.config).items() if k not in _OF_NO_ROW}
    templates = template_sources(tokenizer)
    if any("strftime_now" in template for template in templates):
        settings["date"] = recipe.config.date
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = _read_saved(tokenizer) if backend is None else backend.to_str()
    known = [
        *(content, settings, recipe.origin, recipe.tokenize.__qualname__, recipe.columns),
        *(recipe.required, templates, words, type(tokenizer).__qualname__),
        *(tokenizer.name_or_path, tokenizer.special_tokens_map, _hash_code()),
        sorted((name, repr(value)) for name, value in tokenizer.init_kwargs.items()),
    ]
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


def _read_saved(tokenizer: Any) -> list[tuple[str, bytes]]:
    """Return the files that a tokenizer saves, which hold its merges and scores, too."""
    with TemporaryDirectory() as name:
        tokenizer.save_pretrained(name)
        files = sorted(file for file in Path(name).rglob("*") if file.is_file())
        return [(file.name, file.read_bytes()) for file in files]


@functools.cache
def _hash_code() -> bytes:
    """Return a hash of the code that makes token ids, and of the versions of what it calls."""
    found = hashlib.blake2b(repr([version(name) for name in _PACKAGES]).encode())
    for room in (batch, conversations, data):
        for file in sorted(Path(room.__path__[0]).glob("*.py")):
            found.update(file.read_bytes())
    return found.digest()


def _read_stamp(file: Path) -> list[int]:
    """Return by what a file is known not to have changed. Nobody can set the time of its last
    change, as that of its content."""
    stat = file.stat()
    return [stat.st_size, stat.st_ctime_ns, stat.st_ino]


def _hash_file(hashes: ContentCache, file: Path, progress: Callable[..., None]) -> tuple[Any, ...]:
    """Return the endings of a file's name, which say how it is read, and the hash of its bytes,
    which is known already of a file with this stamp."""
    named = repr([str(file.absolute()), _read_stamp(file)])
    key = hashlib.blake2b(named.encode(), digest_size=32).digest()
    if (found := hashes.get_many([key])[0]) is None:
        progress(f"reading {file.name}")
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "blake2b").digest()
        hashes.put_many({key: found})
    return *file.suffixes, found


def _sign(key: str, text: str) -> str:
    """Return the checksum of what is noted of the entry with this key."""
    return hashlib.blake2b(f"{key}\n{text}".encode(), digest_size=16).hexdigest()


def _check_entry(folder: Path) -> dict[str, Any] | None:
    """Return what is noted of an entry; None if there is none. A damaged one is removed."""
    if not folder.exists():
        return None
    try:
        checksum, _, text = read_text(folder / ENTRY, _MOST_ENTRY).partition("\n")
        if checksum != _sign(folder.name, text):
            raise ValueError("the checksum of its notes does not match")
        entry: dict[str, Any] = parse_json(text)
        if _read_stamp(folder / ROWS) == entry["stamp"]:
            return entry
        with pa.memory_map(str(folder / ROWS)) as file:  # written since, or copied
            if all(zlib.crc32(file.read_at(*b["place"])) == b["crc32"] for b in entry["blocks"]):
                return entry
        why = "its checksums are others"
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        why = str(error)
    _log.warning("%s of the cache is damaged (%s), and is made again.", folder, why)
    shutil.rmtree(folder, ignore_errors=True)
    return None


def _fill(
    rows: BinaryIO,
    recipe: RowRecipe,
    found: Any,
    size: int,
    tokenizer: Any,
    progress: Callable[..., None],
) -> dict[str, Any]:
    """Tokenize all blocks into a file, and return what the entry says of it.

    Raises:
        WholeTableError: if the rows have to be read in one table.
    """
    count = max(1, min(count_usable_cores(), size // BLOCK_BYTES))
    fixed = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    spec = ProcessSpec(
        "tokenizing process",
        [sys.executable, "-m", "hybridrl.data.block_program"],
        pickle.dumps((recipe, tokenizer)),
        {**without_secrets(os.environ, ()), **fixed, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    noted: dict[int, dict[str, Any]] = {}
    failed: dict[int, Exception] = {}
    waiting: dict[int, RowBlock] = {}
    blocks = enumerate(iterate_blocks(found, recipe.required, recipe.origin / "path"))
    done = 0
    with contextlib.closing(ProcessPool(spec, count, 1)) as pool:
        while True:
            # Of several failures the first row's is told, so nothing is read after one.
            room = 0 if failed else count + min(count, _MOST_WAITING) - len(waiting)
            for number, block in itertools.islice(blocks, room):
                waiting[number] = block
                pool.submit([WorkItem(number, functools.partial(_hand_out, block), math.inf, True)])
            if not waiting:
                break
            progress(f"tokenizing {recipe.place} (MiB)", done >> 20, max(done, size, 1 << 20) >> 20)
            try:
                results = pool.poll(_TICK_S)
            except ProcessStartError as error:
                raise HybridRLError(f"No process can tokenize rows: {error}{error.tail}") from error
            for result in results:
                block = waiting.pop(result.key)
                done += block.size
                if result.status != "ok":
                    failed[result.key] = _explain_failure(result, block, recipe)
                    continue
                content, of_block = result.value
                noted[result.key] = {"place": [len(content), rows.tell()], **of_block}
                rows.write(content)
        if failed:
            raise failed[min(failed)]
        if not noted:  # which is for the reader to say
            raise WholeTableError
        rows.flush()
        os.fsync(rows.fileno())
    return {
        "stamp": _read_stamp(Path(rows.name)),
        "blocks": [noted[number] for number in sorted(noted)],
    }


def _hand_out(block: RowBlock, _: int) -> RowBlock:
    return block


def _explain_failure(result: ItemResult, block: RowBlock, recipe: RowRecipe) -> Exception:
    """Return the error of a block that a process has failed at."""
    first, last = block.before + 1, block.before + len(block.rows)
    if isinstance(result.value, DataError):  # its numbers of rows are those of the block
        return DataError(f"{result.value} (Read were rows {first:,} to {last:,}.)")
    if isinstance(result.value, HybridRLError):
        return result.value
    why = result.value or f"its process {result.loss}{result.tail}"
    return HybridRLError(
        f"The rows of {recipe.place} from row {first} on could not be tokenized: {why}"
    )


def _open_rows(file: Path, blocks: list[dict[str, Any]], recipe: RowRecipe) -> Batch:
    """Map the rows, and say what there is to say of them, as of rows that are read in one go."""
    refused = recipe.refused()
    for name, level, text in dict.fromkeys(tuple(log) for block in blocks for log in block["logs"]):
        logging.getLogger(name).log(level, "%s", text)
    refused.merge([block["refused"] for block in blocks])
    buffer = pa.memory_map(str(file)).read_buffer()
    streams = (buffer.slice(begin, size) for size, begin in (block["place"] for block in blocks))
    parts = [Batch(pa.ipc.open_stream(stream).read_all()) for stream in streams]
    # Other blocks could hold it, unless the rows have it of another column.
    left_out = {
        name
        for part, block in zip(parts, blocks, strict=True)
        for name in block["refused"]["left_out"]
        if name not in part
    }
    tables = [part.select(n for n in part.columns if n not in left_out).table for part in parts]
    tables = without_mixed_columns(tables, recipe.place, recipe.named)
    rows = Batch(pa.concat_tables(tables, promote_options="permissive"))
    if CONVERSATION in rows and (rows[CONVERSATION].diff() != 0).all():  # each has one row
        rows = rows.select(name for name in rows.columns if name != CONVERSATION)
    refused.tell()
    return rows
