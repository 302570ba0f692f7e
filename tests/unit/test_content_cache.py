"""The cache of expensive values: what it finds, forgets, and survives. Damage costs entries and is
never a wrong value."""

import importlib.metadata
import json
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest

from hybridrl.cli import main
from hybridrl.config.schema import CacheConfig
from hybridrl.errors import ConfigError
from hybridrl.system import content_cache
from hybridrl.system.content_cache import (
    ContentCache,
    compute_key,
    find_cache_folder,
    hash_loaded_code,
    hash_plain,
    open_cache,
)

VALUES = {bytes([number]) * 32: f"value {number}".encode() * 5 for number in range(1, 6)}
KEYS = list(VALUES)


@pytest.fixture
def config(tmp_path):
    return CacheConfig(use=["verdicts"], folder=str(tmp_path / "cache"))


def filled(config, values=VALUES):
    cache = ContentCache(config, "verdicts")
    cache.put_many(values)
    return cache


def segments(config, kind="verdicts"):
    return sorted(Path(config.folder, kind).iterdir())


def the_segment(config):
    (path,) = segments(config)
    return path


def found_anew(config, keys=KEYS):
    """What an instance finds that has nothing in memory."""
    return ContentCache(config, "verdicts").get_many(keys)


def test_values_are_found_by_others(config):
    filled(config)
    assert found_anew(config) == list(VALUES.values())
    assert found_anew(config, [b"?" * 32, None, KEYS[0]]) == [None, None, VALUES[KEYS[0]]]


def test_nothing_is_written_before_there_is_a_value(config, tmp_path):
    cache = filled(config, {})
    assert cache.get_many([]) == [] and cache.get_many([None]) == [None]
    assert not (tmp_path / "cache").exists()


def test_an_empty_value_is_a_value(config):
    filled(config, {KEYS[0]: b""})
    assert found_anew(config, KEYS[:2]) == [b"", None]


def test_it_is_used_only_for_what_is_asked(config):
    assert open_cache(None, "verdicts") is None
    assert open_cache(CacheConfig(), "verdicts") is None
    assert open_cache(config, "log_probs") is None
    assert open_cache(config, "verdicts") is not None


def test_its_folder_is_no_url():
    with pytest.raises(ConfigError, match=r"cache\.folder=s3://bucket/x: must be a folder"):
        ContentCache(CacheConfig(folder="s3://bucket/x"), "verdicts")


def test_the_default_folder_is_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert find_cache_folder(CacheConfig()) == tmp_path / "hybridrl"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_cache_folder(CacheConfig()) == tmp_path / ".cache" / "hybridrl"


def test_kinds_do_not_see_each_other(config):
    filled(config)
    assert ContentCache(config, "log_probs").get_many(KEYS) == [None] * 5


def test_what_others_write_meanwhile_is_found(config):
    early, late = ContentCache(config, "verdicts"), filled(config)
    assert early.get_many(KEYS) == list(VALUES.values())
    new = {b"n" * 32: b"new"}
    late.put_many(new)
    assert early.get_many(list(new)) == [b"new"]


def test_a_flipped_bit_anywhere_is_no_wrong_value(config):
    filled(config)
    whole = the_segment(config).read_bytes()
    for bit in range(0, 8 * (64 + 35), 7):
        content = bytearray(whole)
        content[bit // 8] ^= 1 << bit % 8  # in the first entry: its header, then its value
        the_segment(config).write_bytes(content)
        first, *others = found_anew(config)
        assert first is None, bit
        wanted = list(VALUES.values())[1:]
        assert all(got in (None, one) for got, one in zip(others, wanted, strict=True)), bit


def test_a_damaged_value_costs_no_other_and_is_computed_again(config):
    filled(config)
    with the_segment(config).open("r+b") as file:
        file.seek(70)
        file.write(b"!!")
    cache = ContentCache(config, "verdicts")
    assert cache.get_many(KEYS) == [None, *list(VALUES.values())[1:]]
    cache.put_many({KEYS[0]: VALUES[KEYS[0]]})
    assert found_anew(config) == list(VALUES.values())


@pytest.mark.parametrize("lost", [1, 34, 35, 60, 99, 100])
def test_a_truncated_segment_keeps_its_whole_entries(config, lost):
    filled(config)
    os.truncate(the_segment(config), the_segment(config).stat().st_size - lost)
    kept = 4 if lost < 100 else 3
    assert found_anew(config) == [*list(VALUES.values())[:kept], *[None] * (5 - kept)]


def test_a_segment_is_truncated_behind_a_readers_back(config):
    cache = ContentCache(config, "verdicts")
    filled(config)
    cache.get_many([])  # knows where the values are
    os.truncate(the_segment(config), 110)
    assert cache.get_many(KEYS) == [VALUES[KEYS[0]], *[None] * 4]


@pytest.mark.parametrize("content", [b"", b"\0" * 500, b"hrlcache", os.urandom(4096)])
def test_a_file_that_is_no_segment_is_passed_over(config, content):
    filled(config)
    Path(config.folder, "verdicts", "0.entries").write_bytes(content)
    assert found_anew(config) == list(VALUES.values())


def test_a_value_under_another_key_is_not_found(config):
    """Two entries whose values were exchanged, checksums included."""
    filled(config, dict(list(VALUES.items())[:2]))
    with the_segment(config).open("r+b") as file:
        content = file.read()
        first, second = content[:99], content[99:]
        file.seek(0)
        file.write(first[:8] + second[8:40] + first[40:] + second[:8] + first[8:40] + second[40:])
    assert found_anew(config, KEYS[:2]) == [None, None]


def test_a_removed_folder_is_no_error(config):
    cache, reader = filled(config), ContentCache(config, "verdicts")
    reader.get_many([])
    for path in segments(config):
        path.unlink()
    Path(config.folder, "verdicts").rmdir()
    assert reader.get_many(KEYS) == [None] * 5
    assert cache.get_many(KEYS) == list(VALUES.values())  # from memory
    cache.put_many(VALUES)
    assert found_anew(config) == list(VALUES.values()) and not cache.faults


def test_a_folder_that_cannot_be_written_costs_only_the_disk(config, tmp_path):
    (tmp_path / "cache").write_text("a file where the folder should be")
    cache = filled(config)
    assert cache.get_many(KEYS) == list(VALUES.values())
    assert len(cache.faults) == 1
    assert "cache.folder" in cache.faults[0] and str(tmp_path) in cache.faults[0]
    cache.put_many({b"x" * 32: b"more"})
    assert cache.get_many([b"x" * 32]) == [b"more"] and len(cache.faults) == 1


def test_a_disk_that_fills_costs_only_the_disk(config, monkeypatch):
    class Full(content_cache.FileIO):
        def write(self, content):
            if self.tell() > 100:
                raise OSError(28, "No space left on device")
            return super().write(bytes(content)[:150])

    monkeypatch.setattr(content_cache, "FileIO", Full)
    cache = filled(config)
    assert cache.get_many(KEYS) == list(VALUES.values())
    assert "disk is full" in cache.faults[0]
    assert found_anew(config) == [VALUES[KEYS[0]], *[None] * 4]  # what was written whole


def test_short_writes_are_continued(config, monkeypatch):
    class Slow(content_cache.FileIO):
        def write(self, content):
            return super().write(bytes(content)[:7])

    monkeypatch.setattr(content_cache, "FileIO", Slow)
    filled(config)
    assert found_anew(config) == list(VALUES.values())


def write_many(config, number):
    cache = ContentCache(config, "verdicts")
    for count in range(40):
        cache.put_many({hash_plain(number, count): f"{number} {count}".encode()})


def test_many_writers_at_once(config):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_many, args=(config, n)) for n in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    expected = {hash_plain(n, c): f"{n} {c}".encode() for n in range(4) for c in range(40)}
    assert found_anew(config, list(expected)) == list(expected.values())


def write_until_killed(config):
    cache, count = ContentCache(config, "verdicts"), 0
    while True:
        cache.put_many({hash_plain(count): f"{count} ".encode() * 1000})
        count += 1


def test_writers_that_are_killed_leave_no_wrong_value(config):
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        writer = context.Process(target=write_until_killed, args=(config,))
        writer.start()
        time.sleep(0.15)
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
    found = found_anew(config, [hash_plain(count) for count in range(10)])
    assert found[0] is not None
    assert all(value in (None, f"{n} ".encode() * 1000) for n, value in enumerate(found))


def test_the_oldest_entries_go_when_it_is_full(tmp_path):
    config = CacheConfig(folder=str(tmp_path), max_gib=64_000 / 2**30)
    cache = ContentCache(config, "verdicts")
    keys = [hash_plain(number) for number in range(200)]
    for key in keys:
        cache.put_many({key: b"v" * 1000})
        assert sum(entry.stat().st_size for entry in segments(config)) <= 64_000
    found = found_anew(config, keys)
    first = next(number for number, value in enumerate(found) if value)
    assert 130 < first < 150  # an entry has 1064 bytes, and a segment about 4
    assert found == [None] * first + [b"v" * 1000] * (200 - first)


def test_the_bound_is_of_all_kinds_together(tmp_path):
    config = CacheConfig(folder=str(tmp_path), max_gib=10_000 / 2**30)
    filled(config, {hash_plain(n): b"v" * 1000 for n in range(5)})
    other = ContentCache(config, "log_probs")
    other.put_many({hash_plain(n): b"w" * 1000 for n in range(8)})
    assert segments(config) == [] and len(segments(config, "log_probs")) == 1


def test_files_of_others_in_the_folder_stay(tmp_path):
    config = CacheConfig(folder=str(tmp_path), max_gib=1e-9)
    (tmp_path / "tokens").mkdir()
    (tmp_path / "tokens" / "rows.arrow").write_bytes(b"x" * 1000)
    filled(config)
    assert (tmp_path / "tokens" / "rows.arrow").stat().st_size == 1000


def test_memory_is_bounded_too(config, monkeypatch):
    monkeypatch.setattr(content_cache, "_MEMORY_BYTES", 2500)
    cache = ContentCache(config, "verdicts")
    keys = [hash_plain(number) for number in range(5)]
    for key in keys:
        cache.put_many({key: b"v" * 1000})
    for path in segments(config):
        path.unlink()
    assert [value is not None for value in cache.get_many(keys)] == [False] * 3 + [True] * 2


def test_small_values_are_bounded_too(config, monkeypatch):
    monkeypatch.setattr(content_cache, "_MEMORY_BYTES", 1000)
    cache = filled(config, {hash_plain(number): b"" for number in range(100)})
    assert len(cache._memory) <= 5


def test_counts_are_those_since_the_last(config):
    cache = filled(config)
    cache.get_many([*KEYS, b"?" * 32])
    assert cache.take_counts() == {"cache_verdicts_asked": 6, "cache_verdicts_hits": 5}
    assert cache.take_counts() == {"cache_verdicts_asked": 0, "cache_verdicts_hits": 0}


DIFFERENT = [
    (1,),
    (1.0,),
    (True,),
    ("1",),
    (b"1",),
    (None,),
    ([1],),
    ((1,),),
    ({1: 2},),
    ({"1": 2},),
    (1, 2),
    ([1, 2],),
    ("a", "b"),
    ("ab",),
    ("",),
    (),
    (0.0,),
    (-0.0,),
    ("ä",),
    ("a\u0308",),
    ("\ud800",),
]


def test_what_differs_has_another_key():
    keys = [hash_plain(*parts) for parts in DIFFERENT]
    assert None not in keys and len(set(keys)) == len(DIFFERENT)


def test_equal_parts_have_one_key_however_they_came_about():
    text, rows = "some text", [["x", "y"]] * 2
    assert hash_plain(text, text, rows) == hash_plain(
        "some " + "".join("text"), json.loads('"some text"'), [["x", "y"], ["x", "y"]]
    )


class Text(str):
    pass


@pytest.mark.parametrize(
    "part",
    [
        *(object(), print, [lambda: 0], {"a": re.compile("a")}, Text("a"), bytearray(b"a")),
        *(
            np.zeros(3),
            np.float64(1),
            [np.zeros((2, 3))],
            {"a": (1, np.int64(2))},
            hash_plain.__code__,
        ),
    ],
)
def test_what_is_no_plain_data_has_no_key(part):
    """Arrays of another shape or dtype may have the same bytes."""
    assert hash_plain("verdicts", part) is None
    assert compute_key(b"verdicts", hash_plain(part)) is None


def test_another_version_of_the_code_has_other_keys(monkeypatch):
    before = compute_key(b"a")
    monkeypatch.setattr(content_cache, "hash_installed_code", lambda: b"another")
    assert before != compute_key(b"a") != compute_key(b"b")
    monkeypatch.setattr(content_cache, "hash_installed_code", lambda: None)
    assert compute_key(b"a") is None


class Distribution:
    def __init__(self, record, version="1.0.dev0"):
        self.name, self.version, self.record = "package", version, record

    def read_text(self, name):
        return self.record if name == "RECORD" else None


def test_the_version_is_of_sources_and_packages(monkeypatch, tmp_path):
    for name in ("one.py", "system/two.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("1")
    monkeypatch.setattr(content_cache, "_ROOT", tmp_path)
    monkeypatch.setattr(content_cache, "_BEGAN", math.inf)
    installed = []
    monkeypatch.setattr(importlib.metadata, "distributions", lambda: installed)
    version = content_cache.hash_installed_code.__wrapped__
    first = version()
    (tmp_path / "notes.txt").write_text("2")
    assert version() == first is not None
    seen = [first]
    (tmp_path / "system" / "two.py").write_text("2")
    seen.append(version())
    (tmp_path / "one.py").rename(tmp_path / "three.py")
    seen.append(version())
    for package in (
        Distribution("a.py,sha256=1,1"),
        Distribution("a.py,sha256=2,1"),  # installed anew from another commit
        Distribution("a.py,sha256=2,1", "1.0"),
        Distribution(None),
    ):
        installed[:] = [package]
        seen.append(version())
    assert None not in seen and len(set(seen)) == len(seen)


def test_a_library_that_is_not_installed_has_no_version(monkeypatch, tmp_path):
    """Its sources may change, and its version stays."""
    (tmp_path / "peft").mkdir()
    (tmp_path / "peft" / "__init__.py").write_text("")
    version = content_cache.hash_installed_code.__wrapped__
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    assert version() is None


def test_loaded_code_is_what_users_have_imported(monkeypatch, tmp_path):
    monkeypatch.setattr(content_cache, "_BEGAN", math.inf)
    monkeypatch.setattr(sys, "modules", {"math": math, "odd": types.ModuleType("odd")})
    monkeypatch.syspath_prepend(tmp_path)

    def loaded(name, file):
        module = types.ModuleType(name)
        module.__file__ = str(file)
        monkeypatch.setitem(sys.modules, name, module)
        content_cache._loaded.clear()
        return hash_loaded_code()

    mine = tmp_path / "mine.py"
    mine.write_text("1")
    seen = [loaded("mine", mine)]
    assert loaded("ops", "_ops.py") == seen[0]  # as `torch.ops` has
    library = tmp_path / "site-packages" / "library.py"
    assert loaded("library", library) == seen[0]
    mine.write_text("2")
    seen.append(loaded("mine", mine))
    seen.append(loaded("other", mine))
    assert None not in seen and len(set(seen)) == 3
    assert loaded("gone", tmp_path / "gone.zip" / "gone.py") is None


@pytest.fixture
def own_module(monkeypatch, tmp_path):
    """The only loaded module, in a folder of its own."""
    (tmp_path / "mine").mkdir()
    module = types.ModuleType("mine")
    module.__file__ = str(tmp_path / "mine" / "mine.py")
    module.__cached__ = str(tmp_path / "mine.pyc")
    (tmp_path / "mine" / "mine.py").write_text("1")
    monkeypatch.setattr(content_cache, "_BEGAN", math.inf)
    monkeypatch.setattr(content_cache, "_loaded", {})
    monkeypatch.setattr(sys, "modules", {"mine": module})
    return tmp_path


def test_a_loaded_file_that_is_replaced_is_not_known(own_module):
    """Its own times may stay as they were, for instance if its folder is renamed."""
    (own_module / "new").mkdir()
    (own_module / "new" / "mine.py").write_text("2")
    assert hash_loaded_code() == hash_loaded_code() is not None
    (own_module / "mine").rename(own_module / "old")
    assert hash_loaded_code() is None
    (own_module / "new").rename(own_module / "mine")
    assert hash_loaded_code() is None


def test_the_bytecode_that_may_have_run_is_in_the_key(own_module):
    seen = [hash_loaded_code()]
    for content in (b"1", b"2"):
        content_cache._loaded.clear()
        (own_module / "mine.pyc").write_bytes(content)
        seen.append(hash_loaded_code())
    assert None not in seen and len(set(seen)) == 3


def test_code_that_changes_while_a_process_has_it_is_not_known(monkeypatch, tmp_path):
    """Nobody knows whether it was loaded before or after."""
    mine = tmp_path / "mine.py"
    mine.write_text("1")
    before = mine.stat()
    monkeypatch.setattr(content_cache, "_BEGAN", before.st_ctime + 1e-3)
    assert content_cache._hash_sources({"mine": mine}) is not None
    time.sleep(0.02)
    mine.write_text("2")
    os.utime(mine, ns=(before.st_atime_ns, before.st_mtime_ns))  # as if unchanged
    assert content_cache._hash_sources({"mine": mine}) is None


def test_equal_keys_are_looked_up_and_filled_together(config):
    cache = filled(config, {KEYS[0]: b"a"})
    keys = [KEYS[1], KEYS[0], None, KEYS[1], None, KEYS[0]]
    assert cache.recall(keys) == ({1: b"a", 5: b"a"}, [[0, 3], [2], [4]])
    assert cache.recall([]) == ({}, [])
    assert cache.take_counts() == {"cache_verdicts_asked": 4, "cache_verdicts_hits": 2}


def test_what_has_no_key_is_not_kept(config, tmp_path):
    cache = filled(config, {None: b"a"})
    assert cache.get_many([None]) == [None] and not (tmp_path / "cache").exists()


def test_the_command_lists_and_prunes(config, capsys):
    filled(config)
    ContentCache(config, "log_probs").put_many({KEYS[0]: b"12345678"})

    def run(*arguments):
        with pytest.raises(SystemExit) as end:
            main(["cache", "--folder", config.folder, *arguments])
        assert end.value.code == 0
        return capsys.readouterr().out

    listed = re.findall(r"(\w+) +│ +([\d,]+) +│ +([\d.]+)", run())
    assert sorted(listed) == [("log_probs", "1", "0.0"), ("verdicts", "5", "0.0")]
    assert run("--prune", "1") == run()
    pruned = run("--prune", str(100 / 2**30))
    assert "log_probs" in pruned and "verdicts" not in pruned
    assert "log_probs" not in run("--prune", "0") and not list(Path(config.folder).glob("*/*"))


@pytest.mark.parametrize("given", ["nan", "inf", "-1", "2GiB"])
def test_a_size_that_is_no_number_of_gib_is_an_error(config, capsys, given):
    filled(config)
    with pytest.raises(SystemExit) as end:
        main(["cache", "--folder", config.folder, "--prune", given])
    assert end.value.code == 2
    assert f"--prune: {given} is not a size in GiB" in capsys.readouterr().err
    assert list(Path(config.folder).glob("*/*"))
