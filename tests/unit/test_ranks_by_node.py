"""Which ranks share a node."""

import pytest

from hybridrl.errors import ConfigError
from hybridrl.parallel.gradient_reduction import group_ranks_by_node


@pytest.mark.parametrize(
    ("ranks", "nodes", "expected"),
    [
        ([0, 1, 2, 3], "aabb", [[0, 1], [2, 3]]),
        ([0, 1, 2, 3], "abab", [[0, 2], [1, 3]]),
        ([1, 3], "abab", [[1, 3]]),
        ([0, 1, 2], "abc", [[0], [1], [2]]),
    ],
)
def test_ranks_of_each_node(ranks, nodes, expected):
    assert group_ranks_by_node(ranks, nodes) == expected


def test_nodes_with_more_ranks_than_others_are_refused():
    with pytest.raises(ConfigError, match="there are 3 on first, 1 on second"):
        group_ranks_by_node([0, 1, 2, 3], ["first"] * 3 + ["second"])
