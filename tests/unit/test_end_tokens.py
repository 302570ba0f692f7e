"""The tokens that end a response: all that a model's files name, and the one that closes a turn."""

import json

import pytest
from published_models import CHATML, PUBLISHED, byte_tokenizer

from hybridrl.checks.models.tokenizer_checks import find_end_tokens, remark_on_ends
from hybridrl.conversations.turn_ends import closing_token

PLAIN = (
    "{% for message in messages %}{{ message.role + ': ' + message.content + '\n' }}{% endfor %}"
)
STRICT = "{{ raise_exception('no') }}"


def folder_with(tmp_path, config, generation=None):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3", **config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "more"),
    [
        ({"eos_token_id": [9, 4]}, None, {9, 4}),
        ({"eos_token_id": 9}, {"eos_token_id": [5, 6]}, {9, 5, 6}),
        ({"eos_token_id": None}, {"eos_token_id": 5}, {5}),
        (
            {"model_type": "gemma3", "text_config": {"eos_token_id": 9}, "eos_token_id": [7]},
            None,
            {9, 7},
        ),
    ],
)
def test_what_all_three_files_name_ends_a_response(config, generation, more, tmp_path):
    tokenizer = byte_tokenizer(PUBLISHED["qwen3"].words)
    path = folder_with(tmp_path, config, generation)
    assert set(find_end_tokens(path, tokenizer)) == more | {tokenizer.eos_token_id}


@pytest.mark.parametrize(
    ("name", "token"),
    [
        ("qwen3", "<|im_end|>"),
        ("gemma3", "<end_of_turn>"),
        ("mistral3", "</s>"),
        ("gpt_oss", "<|return|>"),
        ("glm4_moe", "<|user|>"),  # nothing closes a turn but the next one
        ("llama", "<|eot_id|>"),
        ("deepseek_v3", "<|end_of_sentence|>"),
    ],
)
def test_the_token_that_closes_a_turn_is_seen_in_the_template(name, token):
    tokenizer = byte_tokenizer(PUBLISHED[name].words)
    tokenizer.eos_token = tokenizer.pad_token
    chat = tokenizer.chat_template.replace("eos_token", f"'{token}'")
    tokenizer.chat_template = chat
    assert closing_token(tokenizer) == tokenizer.convert_tokens_to_ids(token)


@pytest.mark.parametrize("template", [None, PLAIN, STRICT])
def test_where_no_token_closes_a_turn_none_is_found(template):
    tokenizer = byte_tokenizer(PUBLISHED["qwen3"].words)
    tokenizer.chat_template = template
    assert closing_token(tokenizer) is None


def test_a_closing_token_that_no_file_names_ends_responses_and_is_reported(tmp_path):
    tokenizer = byte_tokenizer(PUBLISHED["qwen3"].words)
    tokenizer.eos_token = tokenizer.pad_token
    path = folder_with(tmp_path, {"eos_token_id": tokenizer.eos_token_id})
    closing = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert find_end_tokens(path, tokenizer) == tuple(sorted({tokenizer.eos_token_id, closing}))
    assert f"`<|im_end|>` (token {closing})" in remark_on_ends(path, tokenizer)
    tokenizer.eos_token = "<|im_end|>"
    assert remark_on_ends(path, tokenizer) == ""
    assert tokenizer.chat_template == CHATML
