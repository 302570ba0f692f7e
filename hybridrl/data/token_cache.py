"""Token ids of large data, made once by several processes and kept in files that later jobs map.

An entry of the cache is a folder, named by a hash of all that its rows depend on: the files' bytes,
the settings, the tokenizer with its chat template, and the versions of the code. It holds
`rows.arrow`, the blocks one after the other, each an Arrow stream, and `entry.json`: where they
lie, in order, and what there is to say of the rows. A job fills a folder of its own and renames it
when it is complete; of two that do so at once, the second takes the first one's.
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
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow as pa

from hybridrl import conversations, data, errors
from hybridrl.batch.batch import Batch
from hybridrl.conversations.rendering import template_sources
from hybridrl.data.block_program import RowRecipe, WholeTableError
from hybridrl.data.mixture import concat_mixed
from hybridrl.data.row_blocks import RowBlock, RowSource
from hybridrl.data.supervised_examples import CONVERSATION
from hybridrl.errors import DataError, HybridRLError
from hybridrl.processes.pool import ItemResult, ProcessPool, ProcessStartError, WorkItem
from hybridrl.processes.supervised_process import ProcessSpec
from hybridrl.system.bounded_files import load_json, parse_json, read_text
from hybridrl.system.cpu_cores import count_usable_cores
from hybridrl.system.secret_variables import without_secrets
from hybridrl.system.storage import explain_write_errors, replace_file

ROWS, ENTRY, KNOWN_FILES = "rows.arrow", "entry.json", "files.json"
_SETTING = "data.cache_folder"
_OF_NO_ROW = {
    *("task", "tasks", "task_options", "rows", "path", "sources", "split", "eval_path"),
    *("eval_split", "prompts_per_step", "shuffle", "sampler", "sampler_options", "date"),
    *("bad_rows_limit", "cache_folder"),
}
"""Settings of the data that change no token of a row: the files are known by what they hold, and
the date counts only where the chat template asks for it."""
_PACKAGES = ("pyarrow", "transformers", "tokenizers", "jinja2")
_OLD_S = 24 * 3600.0
"""A folder without an entry that is older was left by a job that was killed."""
_PART = ".part-"
_START_S, _BLOCK_S, _TELL_S = 300.0, 1e6, 5.0
_MOST_ENTRY = 4 << 30
_MOST_WAITING = 8
"""Blocks that are read before a process is free for them."""

_progress: ContextVar[Callable[[str], None]] = ContextVar("progress", default=lambda _: None)
_log = logging.getLogger(__name__)


@contextmanager
def reported_to(progress: Callable[[str], None]) -> Iterator[None]:
    """Within the context, tell `progress` how far tokenizing is."""
    token = _progress.set(progress)
    try:
        yield
    finally:
        _progress.reset(token)


def load_token_rows(recipe: RowRecipe, source: RowSource, tokenizer: Any) -> Batch | None:
    """Return the tokenized rows of large data, mapped from the cache, which is filled first if it
    has none of them. Their keys (`hybridrl.data.row_keys`) are among the columns.

    Returns:
        None for rows that have to be read in one table.

    Raises:
        DataError, ConfigError: as `recipe.make`.
        StorageError: if the cache cannot be written.
    """
    place = recipe.config.cache_folder
    cache = Path(place).expanduser() if place else _default_folder()
    with explain_write_errors(cache, _SETTING):
        cache.mkdir(parents=True, exist_ok=True)
    stamps = list(map(_read_stamp, source.files))
    files = [_hash_file(cache, file) for file in source.files]
    key = _compute_key(recipe, tokenizer, [*files, *source.slice])
    folder = cache / key
    if (entry := _check_entry(folder)) is None:
        with explain_write_errors(cache, _SETTING), _temporary_folder(cache) as part:
            try:
                entry = _fill(part / ROWS, recipe, source, tokenizer)
            except WholeTableError:
                return None
            if stamps != list(map(_read_stamp, source.files)):
                raise DataError(f"{recipe.place} has changed while it was read. Start again.")
            (part / ENTRY).write_text(json.dumps(entry))
            try:
                part.rename(folder)
            except OSError:  # another job was here first
                if (entry := _check_entry(folder)) is None:
                    raise
    return _open_rows(folder / ROWS, entry["blocks"], recipe)


def _default_folder() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "hybridrl", "rows")


def _compute_key(recipe: RowRecipe, tokenizer: Any, files: list[str]) -> str:
    """Return the hash of all that token ids depend on, and what is said of the rows."""
    settings = {k: v for k, v in asdict(recipe.config).items() if k not in _OF_NO_ROW}
    templates = template_sources(tokenizer)
    if any("strftime_now" in template for template in templates):
        settings["date"] = recipe.config.date
    backend = getattr(tokenizer, "backend_tokenizer", None)
    words = sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str()
    known = [
        *(files, settings, recipe.origin, recipe.tokenize.__qualname__, recipe.columns),
        *(recipe.required, templates, words, type(tokenizer).__qualname__),
        *(tokenizer.name_or_path, tokenizer.special_tokens_map, _hash_code()),
        sorted((name, repr(value)) for name, value in tokenizer.init_kwargs.items()),
    ]
    return hashlib.blake2b(repr(known).encode(), digest_size=16).hexdigest()


@functools.cache
def _hash_code() -> str:
    """Return a hash of the code that makes token ids, and of the versions of what it calls."""
    found = hashlib.blake2b(repr([version(name) for name in _PACKAGES]).encode(), digest_size=16)
    for room in (data, conversations):
        for file in sorted(Path(str(room.__file__)).parent.glob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _read_stamp(file: Path) -> list[int]:
    """Return by what a file is known not to have changed."""
    stat = file.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ino]


def _hash_file(cache: Path, file: Path) -> str:
    """Return the hash of a file's bytes, which is known already if size and time are those of a
    file that was hashed before."""
    name, stamp = str(file.absolute()), _read_stamp(file)
    try:
        known = dict(load_json(cache / KNOWN_FILES))
    except (OSError, ValueError, TypeError):
        known = {}
    if name in known and known[name][:3] == stamp:
        return str(known[name][3])
    _progress.get()(f"reading {file.name}")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "blake2b").hexdigest()[:32]
    with replace_file(cache / KNOWN_FILES, _SETTING) as part:
        part.write_text(json.dumps({**known, name: [*stamp, found]}))
    return found


def _check_entry(folder: Path) -> dict[str, Any] | None:
    """Return what is noted of an entry; None if there is none. A damaged one is removed."""
    if not folder.exists():
        return None
    try:
        entry: dict[str, Any] = parse_json(read_text(folder / ENTRY, _MOST_ENTRY))
        stat = (folder / ROWS).stat()
        if [stat.st_size, stat.st_mtime_ns] == [entry["size"], entry["mtime"]]:
            return entry
        with pa.memory_map(str(folder / ROWS)) as file:  # written since, or copied
            places = [block["place"] for block in entry["blocks"]]
            if all(zlib.crc32(file.read_at(size, at)) == crc for at, size, crc in places):
                return entry
        why = "its checksums are others"
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException) as error:
        why = str(error)
    _log.warning("%s of the cache is damaged (%s), and is made again.", folder, why)
    shutil.rmtree(folder, ignore_errors=True)
    return None


@contextmanager
def _temporary_folder(cache: Path) -> Iterator[Path]:
    """Yield a folder that is removed unless it is renamed, and remove those of killed jobs."""
    for left in cache.glob(f"{_PART}*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > _OLD_S:
                shutil.rmtree(left)
    folder = Path(tempfile.mkdtemp(prefix=_PART, dir=cache))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _fill(file: Path, recipe: RowRecipe, source: RowSource, tokenizer: Any) -> dict[str, Any]:
    """Tokenize all blocks into a file, and return what the entry says of it.

    Raises:
        WholeTableError: if the rows have to be read in one table.
    """
    count = count_usable_cores()
    ahead = count + min(count, _MOST_WAITING)
    fixed = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    spec = ProcessSpec(
        "tokenizing process",
        [sys.executable, "-m", "hybridrl.data.block_program"],
        (sys.path, pickle.dumps(recipe), pickle.dumps(tokenizer), str(file)),
        {**without_secrets(os.environ, ()), **fixed},
        functools.partial(pickle.dumps, protocol=5),
        pickle.loads,
    )
    found: dict[int, dict[str, Any]] = {}
    failed: dict[int, Exception] = {}
    waiting: dict[int, RowBlock] = {}
    pool, told = ProcessPool(spec, count, 1), time.monotonic()
    try:
        pool.start(count)
        pool.wait_until_ready(_START_S)
        blocks = enumerate(source.blocks(recipe.required))
        while True:
            if not failed:  # of several failures the first row's is told
                for number, block in itertools.islice(blocks, ahead - len(waiting)):
                    waiting[number] = block
                    how = {"limit_s": _BLOCK_S, "is_blocking": True}
                    pool.submit([WorkItem(number, lambda _, block=block: block, **how)])
            if not waiting:
                break
            for result in pool.poll(math.inf):
                block = waiting.pop(result.key)
                if result.status == "ok":
                    found[result.key] = result.value
                else:
                    failed[result.key] = _explain_failure(result, block, recipe)
            if time.monotonic() - told > _TELL_S:
                told, rows = time.monotonic(), sum(one["refused"]["rows"] for one in found.values())
                _progress.get()(f"tokenizing {recipe.place}: {rows:,} rows")
    except ProcessStartError as error:
        raise HybridRLError(f"No process can tokenize rows: {error}{error.tail}") from error
    finally:
        pool.close()
    if failed:
        raise failed[min(failed)]
    if not found:  # which is for the reader to say
        raise WholeTableError
    with file.open("rb") as written:
        os.fsync(written.fileno())
    stat, every = file.stat(), [found[number] for number in sorted(found)]
    return {"size": stat.st_size, "mtime": stat.st_mtime_ns, "blocks": every}


def _explain_failure(result: ItemResult, block: RowBlock, recipe: RowRecipe) -> Exception:
    """Return the error of a block that a process has failed at."""
    if result.status == "OSError":
        return OSError(result.value, os.strerror(result.value))
    kinds = {**vars(errors), WholeTableError.__name__: WholeTableError}
    why = result.value or f"its process {result.loss}{result.tail}"
    if result.status not in kinds:
        begin = f"The rows of {recipe.place} from row {block.before + 1} on"
        return HybridRLError(f"{begin} could not be tokenized: {why}")
    error: Exception = kinds[result.status](why)
    return error


def _open_rows(file: Path, blocks: list[Mapping[str, Any]], recipe: RowRecipe) -> Batch:
    """Map the rows, and say what there is to say of them, as of rows that are read in one go."""
    refused = recipe.refused()
    for name, level, text in dict.fromkeys(tuple(log) for block in blocks for log in block["logs"]):
        logging.getLogger(name).log(level, "%s", text)
    refused.merge([block["refused"] for block in blocks])
    buffer = pa.memory_map(str(file)).read_buffer()
    parts = []
    for block in blocks:
        begin, size, _ = block["place"]
        parts.append(Batch(pa.ipc.open_stream(buffer.slice(begin, size)).read_all()))
    rows = concat_mixed(parts, recipe.place, in_one_piece=False)
    if CONVERSATION in rows and (rows[CONVERSATION].diff() != 0).all():  # each has one row
        rows = rows.select(name for name in rows.columns if name != CONVERSATION)
    refused.tell()
    return rows
