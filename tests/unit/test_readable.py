"""Seconds and bytes as people read them, here and on the page of a run."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import hybridrl
from hybridrl.system.formatting import format_bytes, format_gib, format_seconds

DOM = Path(hybridrl.__file__).parent / "report" / "page" / "dom.js"
SECONDS = {
    0: "0 s",
    -0.5: "0 s",
    0.00012: "120 µs",
    0.04: "40 ms",
    0.99949: "999 ms",
    0.99951: "1 s",
    4.243: "4.24 s",
    41: "41 s",
    59.94: "59.9 s",
    59.96: "1 min 0 s",
    90.5: "1 min 31 s",
    3599.6: "1 h 0 min",
    3725: "1 h 2 min",
}
BYTES = {
    0: "0 B",
    999: "999 B",
    1023: "0.999 KiB",
    1536: "1.5 KiB",
    999.6 * 2**20: "0.976 GiB",
    79.26 * 2**30: "79.3 GiB",
    140.6 * 2**30: "141 GiB",
    5 * 2**40: "5 TiB",
    3 * 2**50: "3072 TiB",
}


def test_readable_seconds():
    assert {number: format_seconds(number) for number in SECONDS} == SECONDS


def test_readable_bytes():
    assert {number: format_bytes(number) for number in BYTES} == BYTES


def test_gib():
    assert [format_gib(count) for count in (79.16 * 2**30, 1.004 * 2**30, 13 * 2**20)] == [
        "79.2",
        "1.0",
        "0.013",
    ]


def test_the_page_writes_them_alike():
    if not (node := shutil.which("node")):
        pytest.skip("there is no node here")
    program = (
        f"{DOM.read_text()}\nprocess.stdout.write(JSON.stringify("
        f"[{[*SECONDS]}.map(Report.seconds), {[*BYTES]}.map(Report.bytes)]));"
    )
    done = subprocess.run([node, "-"], input=program, capture_output=True, text=True)
    assert not done.stderr
    assert json.loads(done.stdout) == [[*SECONDS.values()], [*BYTES.values()]]
