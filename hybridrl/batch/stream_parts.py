"""The parts in which samples leave a generator, so that some are scored while others are still
generated."""

STREAM_PARTS = 4


def count_part_rows(rows: int, part: int, parts: int) -> int:
    """Return how many of the rows a part has, if parts before it were full. Parts become smaller,
    4, 3, 2 and 1 tenths of all: while the last one is scored nothing is generated any more, and its
    samples are the longest."""
    return -(-2 * rows * (parts - part) // (parts * (parts + 1)))
