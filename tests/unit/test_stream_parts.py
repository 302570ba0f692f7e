"""Samples leave a generator in parts that become smaller and lose nobody."""

import pytest

from hybridrl.batch.stream_parts import STREAM_PARTS, count_part_rows


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 5, 7, 10, 64, 1023])
def test_parts_have_all_rows(rows):
    counts = [count_part_rows(rows, part, STREAM_PARTS) for part in range(STREAM_PARTS)]
    assert counts == sorted(counts, reverse=True)
    assert rows <= sum(counts) < rows + STREAM_PARTS


def test_the_last_part_is_a_tenth():
    assert [count_part_rows(100, part, 4) for part in range(4)] == [40, 30, 20, 10]
    assert count_part_rows(33, 0, 1) == 33
