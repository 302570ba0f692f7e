"""Reading rows from JSON, CSV, Parquet, Arrow, or a data set of the Hugging Face hub."""

from __future__ import annotations

import logging
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import csv

from hybridrl.config.setting import Setting
from hybridrl.data.json_lines import list_json_lines, read_json_lines
from hybridrl.data.refused_rows import RefusedRows
from hybridrl.data.row_origin import DATA, RowOrigin
from hybridrl.data.table_columns import (
    add_nested_columns,
    check_required_columns,
    without_mixed_columns,
    without_views,
)
from hybridrl.errors import DataError, MissingPackageError, pip_install
from hybridrl.system.hub_access import find_hub_problem, may_be_hub_name

TableReader = Callable[[Path, Mapping[str, str]], Iterable[pa.Table]]

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".jsonl.gz": "jsonl",
    ".ndjson.gz": "jsonl",
    ".json.gz": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
    ".csv.gz": "csv",
    ".tsv.gz": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
TRAIN_SPLIT = "train"
EVAL_SPLITS = ("validation", "valid", "val", "dev", "eval", "test")
"""Splits to evaluate on, as files are named, the first choice first."""
_SAVED_DATASET_FILES = ("dataset_dict.json", "dataset_info.json")
_log = logging.getLogger(__name__)


def find_rows(path: str, split: str | None, origin: RowOrigin = DATA) -> Any:
    """Find what `path` names: a list of files, or the `datasets.Dataset` of the Hugging Face hub,
    whose files are in the hub's cache then.

    Args:
        path: A file, a folder or a glob of `.jsonl`, `.ndjson` or `.json` files (one object per
            line, an array of objects, or one object), of `.csv` or `.tsv` files (all also with
            `.gz`), of `.parquet` or of `.arrow` files; a folder that
            `Dataset.save_to_disk` or `DatasetDict.save_to_disk` wrote; or the name of a data set of
            the hub, `owner/name` or `owner/name:configuration`, if there is no such file.
        split: Of a hub data set, the split (`train` if None; the hub's slices such as `train[:1%]`
            work); of a folder, only files named after it (`train.jsonl`,
            `train-00000-of-00002.parquet`, `train/any.parquet`); if None, those of `train` where
            there are files of several splits, else all; of a saved `DatasetDict`, its split,
            `train` if None.

    Raises:
        DataError: if there is nothing of the name.
        MissingPackageError: if a hub data set is asked for and `datasets` is not installed.
    """
    files = find_data_files(path, split, origin=origin)
    return files or _load_hub_dataset(path, split, origin / "path")


def read_found_rows(
    found: Any,
    path: str,
    required: Mapping[str, str],
    named: Mapping[str, bool],
    refused: RefusedRows,
) -> pa.Table:
    """Read all rows of what `find_rows` has found for `path`.

    Args:
        required: Columns that must be there, by the setting that names them, for instance
            `{"data.prompt_column": "question"}`. Dots lead into objects:
            `reward_model.ground_truth`.
        named: Columns that settings name, and whether their values are read as text. Their values
            may have several types, which each keeps; of JSON, texts are as the file spells them.
        refused: Gets lines that are no rows, see `read_json_lines`.

    Raises:
        DataError: if a file is broken (with its name and line), a required column is missing (with
            the nearest one), or there are no rows.
    """
    setting = refused.origin / "path"
    if isinstance(found, list):
        table = _read_files(found, required, named, refused, setting)
    else:
        table = found.with_format("arrow")[:].combine_chunks()
    if table.num_rows == 0:
        raise DataError(f"`{setting}` is `{path}`, which holds no rows.")
    return _add_required_columns(table, required, f"`{path}`")


def iterate_tables(
    files: list[Path], required: Mapping[str, str], setting: Setting
) -> Iterator[pa.Table]:
    """Yield the rows of files that are not JSON: of Parquet in tables of moderate size, of others
    in one for each file.

    Args:
        required: As of `read_found_rows`.
        setting: Names the files.

    Raises:
        DataError: as `read_found_rows`.
    """
    for file in files:
        kind, read = _READERS[str(_find_format(file.name))]
        try:
            for table in read(file, required):
                yield _add_required_columns(table, required, f"`{file}`")
        except (pa.ArrowException, OSError) as error:
            raise DataError(
                f"`{file}` (`{setting}`) is no readable {kind} file: {error}"
            ) from error


def find_common_format(files: list[Path]) -> str | None:
    """Return `jsonl`, `csv`, `parquet` or `arrow` if all files are of this format."""
    kinds = {_find_format(file.name) for file in files}
    return kinds.pop() if len(kinds) == 1 else None


def may_be_dataset_name(path: str) -> bool:
    """Return whether the path has the form of a hub data set's name, and not of a file's."""
    return may_be_hub_name(path) and _find_format(path) is None


def find_data_files(path: str, split: str | None = None, *, origin: RowOrigin = DATA) -> list[Path]:
    """Return the files that `path` names; none if it may be the name of a hub data set.

    Raises:
        DataError: if it can be neither.
    """
    files = _list_files(path, split, origin)
    if not files and not may_be_dataset_name(path):
        cure = "Give a JSON, CSV, Parquet or Arrow file, or the `owner/name` of a data set."
        if "," in path:
            cure += " Several files are named by their folder, or by a glob such as `data/*.jsonl`."
        raise DataError(
            f"`{origin / 'path'}` is `{path}`, and there is no such file, folder or glob (seen "
            f"from {Path.cwd()}). {cure}"
        )
    return files


def list_splits(path: str) -> list[str]:
    """Return the splits that files of a folder are named after, `train` first, then `EVAL_SPLITS`
    in order; empty if the path is not a folder."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        return []
    files = [file.relative_to(folder) for file in _glob_visible(folder / "**" / "*")]
    named = [file for file in files if _find_format(file.name)]
    return [
        name for name in (TRAIN_SPLIT, *EVAL_SPLITS) if any(_is_split_file(f, name) for f in named)
    ]


def _add_required_columns(table: pa.Table, required: Mapping[str, str], place: str) -> pa.Table:
    """Return the table with all required columns, including those nested in objects."""
    table = without_views(table)
    if table.num_rows == 0:  # and perhaps no columns; another file may have some
        return table
    twice = [name for name, number in Counter(table.column_names).items() if number > 1]
    if twice:
        raise DataError(f"{place} has several columns of the name `{twice[0]}`. Rename one.")
    table = add_nested_columns(table, required.values())
    check_required_columns(table.column_names, required, place)
    return table


def _list_files(path: str, split: str | None, origin: RowOrigin) -> list[Path]:
    place = Path(path).expanduser()
    if place.is_dir():
        return _list_folder_files(place, split, origin)
    files = [place] if place.is_file() else _glob_visible(place)
    if files and split is not None:
        raise DataError(
            f"`{origin / 'split'}` is `{split}`, but `{origin / 'path'}` is `{path}`; a split can "
            "be chosen from a folder or a hub data set only. Unset it "
            f"(`{origin / 'split'}=null`), or name the split's file."
        )
    return files


def _list_folder_files(folder: Path, split: str | None, origin: RowOrigin) -> list[Path]:
    path_setting, split_setting = origin / "path", origin / "split"
    files = [file for file in _glob_visible(folder / "**" / "*") if _find_format(file.name)]
    if (folder / "dataset_dict.json").is_file():
        split = split or "train"
    # `save_to_disk` writes notes beside the rows.
    if any(file.name in _SAVED_DATASET_FILES for file in files):
        files = [file for file in files if file.suffix == ".arrow"]
    if not files:
        raise DataError(
            f"`{path_setting}` is the folder `{folder}`, which holds no file that ends in one of "
            f"{', '.join(_SUFFIXES)}."
        )
    if split is None:
        known = list_splits(str(folder))
        if len(known) < 2:
            return files
        if TRAIN_SPLIT not in known:
            raise DataError(
                f"`{path_setting}` is the folder `{folder}`, which has files of several splits "
                f"({', '.join(known)}) and none that is named after `train`. Name the one to learn "
                f"from, as in {split_setting}={known[0]}."
            )
        split = TRAIN_SPLIT
        _log.warning(
            "`%s` is the folder `%s` with the splits %s: those of `train` are read. `%s` chooses "
            "another.",
            *(path_setting, folder, ", ".join(known), split_setting),
        )
    chosen = [file for file in files if _is_split_file(file.relative_to(folder), split)]
    if not chosen:
        raise DataError(
            f"`{split_setting}` is `{split}`, but no file in the folder `{folder}` is named after "
            f"it; there is {', '.join(str(file.relative_to(folder)) for file in files[:8])}."
        )
    return chosen


def _is_split_file(file: Path, split: str) -> bool:
    return split in file.parts[:-1] or re.split(r"[-_.]", file.name)[0] == split


def _glob_visible(pattern: Path) -> list[Path]:
    root, rest = Path(), deque(pattern.parts)
    # What is there under its very name is no pattern: folders may have brackets in theirs.
    while rest and (not any(c in rest[0] for c in "*?[") or (root / rest[0]).exists()):
        root /= rest.popleft()
    if not rest:
        return []
    found = root.glob(str(Path(*rest)))
    visible = (f for f in found if not any(p.startswith(".") for p in f.relative_to(root).parts))
    return sorted(file for file in visible if file.is_file())


def _find_format(name: str) -> str | None:
    return next((kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix)), None)


def _read_files(
    files: list[Path],
    required: Mapping[str, str],
    named: Mapping[str, bool],
    refused: RefusedRows,
    setting: Setting,
) -> pa.Table:
    kind = find_common_format(files)
    if kind == "jsonl":
        return read_json_lines(list_json_lines(files, setting), required, named, refused)
    if kind is not None:
        tables = list(iterate_tables(files, required, setting))
        tables = without_mixed_columns(tables, refused.place, named)
        return pa.concat_tables(tables, promote_options="permissive")
    unknown = next((file for file in files if _find_format(file.name) is None), None)
    if unknown is not None:
        raise DataError(
            f"`{setting}` includes `{unknown}`, which is by its name no file of rows; expected one "
            f"of {', '.join(_SUFFIXES)}. Rename it if it is one; write rows of another kind as "
            "JSON lines or Parquet."
        )
    raise DataError(
        f"`{setting}` stands for files of different formats, among them `{files[0]}` and "
        f"`{files[-1]}`. Give a glob such as `folder/*.parquet`."
    )


def _read_csv(file: Path, required: Mapping[str, str]) -> Iterator[pa.Table]:
    """Read a table whose first line names the columns. Those of prompts and answers are texts as
    they are written; others become numbers where they can."""
    others = (".margin_column", ".label_column")
    texts = [column for name, column in required.items() if not name.endswith(others)]
    yield csv.read_csv(
        file,
        parse_options=csv.ParseOptions(
            delimiter="\t" if ".tsv" in file.suffixes else ",", newlines_in_values=True
        ),
        convert_options=csv.ConvertOptions(column_types=dict.fromkeys(texts, pa.string())),
    )


def _read_parquet(file: Path, required: Mapping[str, str]) -> Iterator[pa.Table]:
    with pq.ParquetFile(file) as opened:
        yield opened.schema_arrow.empty_table()  # columns, also of no rows
        yield from (pa.Table.from_batches([rows]) for rows in opened.iter_batches(1024))


def _read_arrow(file: Path, required: Mapping[str, str]) -> Iterator[pa.Table]:
    """Read an Arrow stream, as `datasets` writes it, or an Arrow file."""
    with pa.memory_map(str(file)) as source:
        try:
            table = pa.ipc.open_stream(source).read_all()
        except pa.ArrowInvalid:
            table = pa.ipc.open_file(source).read_all()
    yield table.replace_schema_metadata(None)


_READERS: dict[str, tuple[str, TableReader]] = {
    "csv": ("CSV", _read_csv),
    "parquet": ("Parquet", _read_parquet),
    "arrow": ("Arrow", _read_arrow),
}


def _load_hub_dataset(path: str, split: str | None, setting: Setting) -> Any:
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise MissingPackageError(
            f"`{setting}` is `{path}`, which is no file here, and reading a data set of the "
            f"Hugging Face hub needs the package `datasets`: {pip_install('datasets')}"
        ) from error
    name, _, configuration = path.partition(":")
    if (why := find_hub_problem(name, "dataset")) is not None:
        raise DataError(
            f"`{setting}` is `{path}`, which is no file here (seen from {Path.cwd()}), and the "
            f"Hugging Face hub {why}. Give the path of a file or folder, or put the data set into "
            "the hub's cache on this machine (`hf download --repo-type dataset`)."
        )
    load: Callable[..., Any] = load_dataset
    try:
        return load(name, configuration or None, split=split or "train")
    except Exception as error:  # the hub's client raises a dozen unrelated kinds
        reason = str(error).strip().split("\n")[0]
        raise DataError(
            f"`{setting}` is `{path}`, which is no file here, and loading it as a data set of the "
            f"Hugging Face hub (split `{split or 'train'}`) failed: {type(error).__name__}: "
            f"{reason}. Check the spelling and the network, or give the path of a local file."
        ) from error
