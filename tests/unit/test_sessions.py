"""Sessions: every sampled token is there once, with the tokens before it that the engine read."""

import random

import pytest
from agent_cases import TRAINED

from hybridrl.rollout.rollout_engine import EngineOutput
from hybridrl.serving.agent_session import AgentSession


def session(**options):
    return AgentSession("e1", TRAINED, seed=5, **options)


def turn(prompt_ids, token_ids, version=0):
    log_probs = [-0.1 * token for token in token_ids]
    versions = [version] * len(token_ids)
    return EngineOutput(0, prompt_ids, token_ids, log_probs, "stop", versions=versions)


def test_a_prompt_that_goes_on_extends_a_branch():
    found = session()
    found.record("e1", turn([1, 2], [3, 4], 7))
    found.record("e1", turn([1, 2, 3, 4, 5, 6], [8], 9))
    (branch,) = found.end()
    assert branch.prompt_ids == [1, 2] and branch.response_ids == [3, 4, 5, 6, 8]
    assert branch.mask == [1, 1, 0, 0, 1] and branch.turns == [0, 0, 0, 0, 1]
    assert branch.versions == [7, 7, 0, 0, 9]
    assert branch.log_probs == pytest.approx([-0.3, -0.4, 0, 0, -0.8])


def test_any_other_prompt_begins_one():
    found = session()
    found.record("e1", turn([1, 2], [3, 4]))
    found.record("e1", turn([1, 2], [5]))  # the same again
    found.record("e1", turn([1, 2, 3, 9], [6]))  # an edited turn
    found.record("e1", turn([1, 2, 5, 7], [8]))  # goes on with the second
    found.record("e1.again1", turn([1, 2, 3, 4, 1], [2]))  # another part's
    assert [branch.turns for branch in found.end()] == [[0, 0], [2], [1, 1, 3], [4]]


def test_what_was_given_up_does_not_count():
    found = session()
    found.record("e1", turn([1], [2]))
    found.record("e1.again1", turn([1], [3]))
    found.record("e1.again1.judge", turn([4], [5]))
    found.record("e1.again10", turn([1], [6]))
    kept = found.end(["e1.again1"])
    assert [branch.response_ids for branch in kept] == [[3], [5]]
    assert [branch.turns for branch in kept] == [[0], [1]], "counted among those that are kept"


def test_a_turn_is_taken_back_unless_the_program_went_on():
    found = session()
    found.record("e1", turn([1], [2]), "first")
    lost = found.record("e1", turn([1, 2, 3], [4, 5]), "second")
    found.take_back(lost)
    assert found.known("second") is None and found.sampled == 1
    again = found.record("e1", turn([1, 2, 9], [6]))
    found.record("e1", turn([1, 2, 9, 6, 1], [7]))
    found.take_back(again)
    new = found.record("e1", turn([8], [8]))
    found.take_back(new)
    (branch,) = found.end()
    assert branch.response_ids == [2, 9, 6, 1, 7] and branch.turns == [0, 0, 1, 1, 2]


def test_a_session_that_is_over_keeps_nothing_more():
    found = session()
    late = found.record("e1", turn([1], [2]))
    branches = found.end()
    assert found.record("e1", turn([1], [2])) is None
    found.take_back(late)
    assert branches[0].response_ids == [2]
    assert session(is_trained=False).record("own", turn([1], [2])) is None


def test_a_known_turn_has_its_tokens_after_others_came():
    found = session()
    found.record("e1", turn([1, 2], [3, 4]), "first")
    found.record("e1", turn([1, 2, 3, 4, 5], [6]), "second")
    assert found.known("first") == ([1, 2], [3, 4])
    assert found.known("second") == ([1, 2, 3, 4, 5], [6])
    assert found.known("third") is None


def test_seeds_differ_and_come_again():
    asked = [session().next_seed("e1"), *map(session().next_seed, ["e1", "e1", "e1.b", "e1.b"])]
    assert asked[0] == asked[1] and len(set(asked)) == 4


def test_whatever_is_asked_each_turn_is_there_once():
    draw = random.Random(0)
    for _ in range(200):
        found, made = session(), []
        for _ in range(draw.randint(1, 12)):
            prompt = [draw.randint(1, 2) for _ in range(draw.randint(1, 3))]
            if made and draw.random() < 0.8:
                before = draw.choice(made)
                prompt = [*before.prompt_ids, *before.token_ids, *prompt[draw.randint(0, 1) :]]
            new = turn(prompt, [draw.randint(1, 2) for _ in range(draw.randint(1, 3))])
            recorded = found.record("e1", new)
            if draw.random() < 0.3:
                found.take_back(recorded)
            else:
                made.append(new)
        kept = []
        for branch in found.end():
            ids = branch.prompt_ids + branch.response_ids
            for number in sorted(set(branch.turns)):
                at = [
                    place
                    for place, (of, mask) in enumerate(zip(branch.turns, branch.mask, strict=True))
                    if of == number and mask
                ]
                assert at == list(range(at[0], at[-1] + 1))
                start = len(branch.prompt_ids) + at[0]
                kept.append((number, ids[:start], [branch.response_ids[place] for place in at]))
        kept.sort()
        assert [(p, t) for _, p, t in kept] == [(one.prompt_ids, one.token_ids) for one in made]
