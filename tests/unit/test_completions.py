"""The table of a prompt's samples: what is in it, in which order, and that it fits."""

import math

from rich.cells import cell_len

from hybridrl.console.sample_table_text import ShownSample, format_sample_count, format_sample_table

SAMPLES = [
    ShownSample("wrong", 0.0, {"exact": 0.0, "length": 0.0}, -0.5),
    ShownSample("right", 1.0, {"exact": 1.0, "length": 0.0}, 1.5),
    ShownSample("long", -1.0, {"exact": 0.0, "length": -1.0}, -1.0),
]


def test_each_function_and_the_advantage_stand_beside_the_answer():
    heading, *rows = format_sample_table(SAMPLES, 100)
    assert heading.split() == ["reward", "exact", "length", "advantage", "response"]
    assert [row.split() for row in rows] == [
        ["1", "1", "0", "+1.50", "right"],
        ["0", "0", "0", "-0.50", "wrong"],
        ["-1", "0", "-1", "-1.00", "long"],
    ]


def test_functions_whose_names_end_alike_are_told_apart():
    names = ["correctness_reward_func", "strict_reward_func", "strict_reward_func/acc"]
    parts = dict.fromkeys(names, 1.0)
    heading = format_sample_table([ShownSample("a", 1.0, parts)], 100)[0]
    assert heading.split() == ["reward", "correctn…", "strict_r…", "acc", "response"]


def test_of_many_the_best_and_the_worst_are_shown():
    many = [ShownSample(f"answer {i}", float(i)) for i in range(10)]
    answers = [line.split()[-1] for line in format_sample_table(many, 80)[1:]]
    assert answers == ["9", "8", "1", "0"]
    assert format_sample_count(many) == "10 samples, the best and the worst 2"
    assert (
        format_sample_count(SAMPLES) == "3 samples"
        and format_sample_count(SAMPLES[:1]) == "1 sample"
    )


def test_a_single_function_is_the_reward_and_a_dropped_sample_is_last():
    heading, *rows = format_sample_table(
        [ShownSample("a", math.nan, {"exact": math.nan}), ShownSample("b", 0.5, {"exact": 0.5})], 80
    )
    assert heading.split() == ["reward", "response"]
    assert [row.split() for row in rows] == [["0.5", "b"], ["dropped", "a"]]
    (heading, row) = format_sample_table([ShownSample("c", 1.0, {"turns": 3.0})], 80)
    assert heading.split() == ["reward", "turns", "response"] and row.split() == ["1", "3", "c"]


def test_it_fits_any_width():
    names = {f"function number {i}": 1.0 / 3 for i in range(9)}
    for cells in (40, 60, 100, 200):
        lines = format_sample_table([ShownSample("word " * 99, 1e-9, names, 12.345)], cells)
        assert all(cell_len(line) <= cells for line in lines), cells
