"""The first row of the data, shown as the model reads it."""

import json

import pytest
from conversation_cases import tokenizer_of

from hybridrl.batch.batch import Batch
from hybridrl.console.first_row import show_first_row


@pytest.fixture(scope="module")
def tokenizer():
    return tokenizer_of("no_system")


def ids(tokenizer, *texts):
    return [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]


def test_the_tokens_to_learn_of_an_example_are_marked(tokenizer):
    prompt, response = ids(tokenizer, "1+1=\n", "2</s> so?4</s>")
    columns = {"prompt_ids": [prompt], "response_ids": [response]}
    mask = [[1, 1, 0, 0, 0, 0, 1, 1]]
    [row] = show_first_row(Batch.from_columns(columns | {"response_mask": mask}), tokenizer)
    assert row.sentence() == (
        "First example as the model reads it, the tokens to learn between ⟦ and ⟧: "
        "1+1=⏎⟦2</s>⟧ so?⟦4</s>⟧"
    )
    assert row.figures() == {
        "name": "example",
        "pieces": [
            {"text": "1+1=\n", "is_learned": False},
            {"text": "2</s>", "is_learned": True},
            {"text": " so?", "is_learned": False},
            {"text": "4</s>", "is_learned": True},
        ],
    }


def test_a_prompt_has_nothing_to_learn_and_a_pair_has_two_sides(tokenizer):
    prompt, chosen, rejected = ids(tokenizer, "1+1=", "2</s>", "3</s>")
    [row] = show_first_row(Batch.from_columns({"prompt_ids": [prompt, chosen]}), tokenizer)
    assert row.sentence() == "First prompt as the model reads it: 1+1="
    pairs = {"prompt_ids": [prompt], "chosen_ids": [chosen], "rejected_ids": [rejected]}
    sides = show_first_row(Batch.from_columns(pairs), tokenizer)
    assert [side.sentence().partition(": ")[2] for side in sides] == [
        "1+1=⟦2</s>⟧",
        "1+1=⟦3</s>⟧",
    ]
    assert sides[1].name == "pair (rejected)"


def test_a_long_row_is_cut_on_the_console_and_whole_in_the_file(tokenizer):
    texts = ids(tokenizer, "a" * 800, "b" * 800)
    columns = {"prompt_ids": texts[:1], "response_ids": texts[1:]}
    mask = [[1, 0] * 400]
    [row] = show_first_row(Batch.from_columns(columns | {"response_mask": mask}), tokenizer)
    assert len(row.sentence()) < 800 and row.sentence().endswith("⟦b⟧b")
    assert "".join(one["text"] for one in row.figures()["pieces"]) == "a" * 800 + "b" * 800


def test_spaces_that_decoding_drops_alone_are_kept():
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    plain = Tokenizer(models.WordLevel({"▁so": 0, "▁it": 1, "?": 2}, unk_token="?"))
    plain.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain)
    rows = {"prompt_ids": [[0]], "response_ids": [[1, 2]], "response_mask": [[1, 0]]}
    [row] = show_first_row(Batch.from_columns(rows), tokenizer)
    assert [piece.text for piece in row.pieces] == ["so", " it", "?"]


def test_no_control_character_reaches_the_terminal(tokenizer):
    class Wild:
        def decode(self, ids, **options):
            return "\x1b[2J\x07\u202eevil"[: 4 * len(ids)]

    [row] = show_first_row(Batch.from_columns({"prompt_ids": [[1, 2, 3]]}), Wild())
    assert row.sentence().isprintable()
    assert json.loads(json.dumps(row.figures()))["pieces"][0]["text"].startswith("\x1b[2J")
