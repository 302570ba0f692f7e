"""What the data repeats, told before a start."""

from hybridrl.batch.batch import Batch
from hybridrl.data import duplicates as report
from hybridrl.data.duplicates import find_duplicates

TEXTS = [
    "A farmer has chickens and cows, 12 heads and 34 legs: how many cows are there in all?",
    "Two trains leave at noon from towns that are 300 miles apart; when will they meet?",
    "What is the sum of all odd numbers that are less than the square of twenty?",
]


def prompts(texts):
    return Batch.from_columns({"prompt": texts, "answer": [str(n) for n in range(len(texts))]})


def test_the_same_and_nearly_the_same_are_told_apart():
    learned = [*TEXTS, TEXTS[1].upper() + "!", TEXTS[0].replace("A farmer", "The old farmer")]
    kept = [TEXTS[2], TEXTS[1].replace("meet?", "meet again?"), "Another question altogether?"]
    found = find_duplicates(prompts(learned), {"held_out": prompts(kept)}, None)
    training, held_out = found.figures["training"], found.figures["held_out"]
    assert (training["exact_duplicates"], training["near_duplicates"]) == (1, 1)
    assert (held_out["exact_duplicates"], held_out["near_duplicates"]) == (1, 1)
    assert [learned[3], learned[1]] in training["examples"]
    assert "1 (and nearly, 1) of the 5 prompts" in found.remarks[0]
    assert "1 (and nearly, 1) of the 3 held-out prompts" in found.remarks[1]
    near = find_duplicates(prompts([*TEXTS, learned[4]]), {}, None)
    assert "1 (nearly) of the 4 prompts repeat earlier ones" in near.remarks[0]


def test_other_numbers_are_another_problem_and_templates_say_nothing():
    other = TEXTS[0].replace("34", "36")
    made = [f"State the final answer to the following problem: {n} + 4 =" for n in range(100)]
    found = find_duplicates(prompts([TEXTS[0], other, *made]), {}, None)
    assert found.figures["training"]["near_duplicates"] == 0 and not found.remarks


def test_of_very_many_rows_only_equal_ones_are_found(monkeypatch):
    monkeypatch.setattr(report, "MAX_NEAR_ROWS", 3)
    found = find_duplicates(prompts([*TEXTS, TEXTS[0]]), {}, None)
    assert found.figures["training"]["exact_duplicates"] == 1
    assert found.figures["training"]["near_duplicates"] is None and "too long" in found.remarks[1]


def test_prompts_with_two_answers_each_are_no_news():
    assert not find_duplicates(prompts([TEXTS[0], TEXTS[0]]), {}, None, repeats=False).remarks


def test_short_prompts_are_only_compared_as_a_whole():
    for texts in ([""], ["", "a"], [f"{n}+{n}=" for n in range(99)]):
        found = find_duplicates(prompts(texts), {"held_out": prompts(["1 + 2 = 4"])}, None)
        assert not found.remarks and found.figures["training"]["near_duplicates"] == 0
