"""Which of its samples online DPO and expert iteration learn from, against loops by hand."""

import math
import random

import torch

from hybridrl.trainers.expert_iteration import select_best_per_prompt, select_distinct_correct
from hybridrl.trainers.online_dpo import select_best_and_worst

NAN = math.nan


def test_pairs_are_the_best_and_the_worst_of_prompts_whose_samples_differ():
    draw = random.Random(0)
    for _ in range(50):
        prompts, n = draw.randrange(4), draw.randrange(1, 5)
        scores = [[draw.choice([0.0, 1.0, 2.0, NAN]) for _ in range(n)] for _ in range(prompts)]
        found = select_best_and_worst(torch.tensor(scores).reshape(-1), n).tolist()
        expected = []
        for number, row in enumerate(scores):
            known = [(score, place) for place, score in enumerate(row) if not math.isnan(score)]
            if known and max(known)[0] > min(known)[0]:
                highest, lowest = max(s for s, _ in known), min(s for s, _ in known)
                expected += [number * n + row.index(highest), number * n + row.index(lowest)]
        assert found == expected


def sample(group, response, score):
    return {"group_id": group, "response": response, "scores": score}


SAMPLES = [
    *(sample(7, "a", 1.0), sample(7, "a", 1.0), sample(7, "b", 0.0), sample(7, "c", 1.0)),
    *(sample(3, "a", 2.0), sample(3, "d", NAN), sample(3, "e", 5.0), sample(3, "f", 5.0)),
    *(sample(4, "g", NAN), sample(5, "h", -1.0)),
]


def test_each_different_right_answer_counts_once():
    right = [one["scores"] >= 1.0 for one in SAMPLES]
    assert select_distinct_correct(SAMPLES, right) == [0, 3, 4, 6, 7]
    assert select_distinct_correct(SAMPLES, right, most=1) == [0, 4]
    assert select_distinct_correct([], []) == []


def test_the_best_of_each_prompt_is_the_first_of_the_best():
    assert select_best_per_prompt(SAMPLES) == [0, 6, 9]
    assert select_best_per_prompt([]) == []
