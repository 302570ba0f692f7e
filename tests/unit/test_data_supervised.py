import json

import pyarrow as pa
import pytest
from data_rows import CLOSING, with_template

from hybridrl.config.schema import DataConfig
from hybridrl.data.character_tokenizer import build_character_tokenizer
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_tokens import tokenize_conversations, tokenize_examples
from hybridrl.errors import ConfigError, DataError

OPEN_ENDED = CLOSING.replace("<eos> ", "/")
# As reasoning models have it: what was thought is shown in the last turn only.
FORGETFUL = CLOSING.replace(
    "{{ m.content", "{% if loop.last and m.role == 'assistant' %}=={% endif %}{{ m.content"
)
OTHER_OPENING = CLOSING.replace("a-{% endif", "a-=={% endif")


@pytest.fixture(scope="module")
def tokenizer():
    return build_character_tokenizer()


def say(role, content, **further):
    return {"role": role, "content": content, **further}


TALK = [
    say("user", "hi"),
    say("assistant", "yes"),
    say("user", "so"),
    say("assistant", "no"),
]


def conversations(rows, template, **settings):
    rows = pa.Table.from_pylist([{"messages": messages} for messages in rows])
    return tokenize_conversations(
        RowReader(with_template(template), DataConfig(**settings)), rows, "messages"
    )


def examples(rows, tokenizer, **settings):
    return tokenize_examples(
        RowReader(tokenizer, DataConfig(**settings)),
        pa.Table.from_pylist(rows),
        "prompt",
        "response",
    )


def shown(batch, tokenizer):
    """Each row as its prompt and its response, with the tokens that are not learned in brackets."""
    columns = [batch[n].rows() for n in ("prompt_ids", "response_ids", "response_mask")]
    rows = []
    for prompt, response, mask in zip(*columns, strict=True):
        marks = [
            tokenizer.decode([token]) if learned else f"[{tokenizer.decode([token])}]"
            for token, learned in zip(response.tolist(), mask.tolist(), strict=True)
        ]
        rows.append((tokenizer.decode(prompt), "".join(marks).replace("][", "")))
    return rows


def test_examples_end_with_the_end_token(tokenizer):
    rows = pa.table({"prompt": ["1+1=", "2+2="], "answer": ["2", "14<eos>"]})
    batch = tokenize_examples(RowReader(tokenizer), rows, "prompt", "answer")
    assert batch.columns == ["prompt_ids", "response_ids", "response_mask"]
    assert shown(batch, tokenizer) == [("1+1=", "2<eos>"), ("2+2=", "14<eos>")]
    assert str(batch["response_mask"].values.dtype) == "torch.uint8"
    with pytest.raises(DataError, match=r"`data.response_column`.*Did you mean `answer`"):
        tokenize_examples(RowReader(tokenizer), rows, "prompt", "answr")
    with pytest.raises(DataError, match=r"Row 1 .*expected a string"):
        tokenize_examples(RowReader(tokenizer), pa.table({"p": ["a"], "r": [1]}), "p", "r")


def test_a_tokenizer_without_end_token_cannot_teach():
    endless = build_character_tokenizer()
    endless.eos_token = None
    with pytest.raises(DataError, match="no end-of-sequence token"):
        tokenize_examples(RowReader(endless), pa.table({"p": ["a"], "r": ["b"]}), "p", "r")


@pytest.mark.parametrize(
    ("template", "expected"),
    [(CLOSING, ("u-hi<eos> a-", "yes<eos>")), (OPEN_ENDED, ("u-hi/a-", "yes/<eos>"))],
)
def test_a_response_to_a_chat_goes_through_the_template(template, expected):
    tokenizer = with_template(template)
    user, assistant = TALK[:2]
    for row, chat in [
        ({"prompt": [user], "response": "yes"}, None),
        ({"prompt": [user], "response": [assistant]}, None),
        ({"prompt": "hi", "response": [assistant]}, None),
        ({"prompt": "hi", "response": "yes"}, True),
    ]:
        assert shown(examples([row], tokenizer, chat=chat), tokenizer) == [expected]


def test_the_prompts_own_answers_are_not_learned():
    tokenizer = with_template(CLOSING)
    batch = examples([{"prompt": TALK[:3], "response": TALK[3:]}], tokenizer, system_prompt="be")
    assert shown(batch, tokenizer) == [
        ("s-be<eos> u-hi<eos> a-yes<eos> u-so<eos> a-", "no<eos>"),
    ]


@pytest.mark.parametrize(
    ("template", "response"),
    [(CLOSING, "yes<eos>[ u-so<eos> a-]no<eos>"), (OPEN_ENDED, "yes/[u-so/a-]no/<eos>")],
)
def test_only_the_assistants_turns_of_a_conversation_are_learned(template, response):
    rows = [TALK, [*TALK, say("user", "ignored")], [say("system", "be", name="x"), *TALK[:2]]]
    batch = conversations(rows, template)
    close = template[template.index("}}<") + 2 :].split("{%")[0] if "<eos>" in template else "/"
    found = shown(batch, build_character_tokenizer())
    assert found[0] == found[1] == (f"u-hi{close}a-", response)
    assert found[2][0] == f"s-be{close}u-hi{close}a-"


def test_turns_that_follow_each_other_and_other_roles():
    talk = [TALK[0], TALK[1], say("tool", "1+1"), say("assistant", "2"), say("assistant", "3")]
    batch = conversations([talk], CLOSING)
    assert (
        shown(batch, build_character_tokenizer())[0][1]
        == "yes<eos>[ t-1+1<eos> a-]2<eos>[ a-]3<eos>"
    )


@pytest.mark.parametrize(
    ("learn", "expected"),
    [
        (
            "all",
            [("u-hi<eos> a-", "==yes<eos>"), ("u-hi<eos> a-yes<eos> u-so<eos> a-", "==no<eos>")],
        ),
        ("last", [("u-hi<eos> a-yes<eos> u-so<eos> a-", "==no<eos>")]),
    ],
)
def test_answers_are_learned_as_they_are_generated(learn, expected, caplog):
    rows = [TALK, TALK[:2]]
    batch = conversations(rows, FORGETFUL, learn=learn)
    assert shown(batch, build_character_tokenizer()) == [*expected, ("u-hi<eos> a-", "==yes<eos>")]
    assert ("1 conversations became 2 rows" in caplog.text) == (learn == "all")
    if learn == "all":
        assert batch["conversation_number"].tolist() == [0, 0, 1]


def test_each_answer_in_a_row_of_its_own():
    batch = conversations([TALK], CLOSING, learn="each")
    assert shown(batch, build_character_tokenizer()) == [
        ("u-hi<eos> a-", "yes<eos>"),
        ("u-hi<eos> a-yes<eos> u-so<eos> a-", "no<eos>"),
    ]
    assert "conversation_number" not in conversations([TALK], CLOSING).columns


def test_only_the_answers_that_a_rendering_changes_need_another():
    """Thoughts stay until the next question, as in Qwen3's template for tool calls."""
    template = CLOSING.replace(
        "{{ m.content",
        "{% set ns = namespace(last=0) %}{% for n in messages %}{% if n.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% if m.role == 'assistant' and loop.index0 > ns.last %}=={% endif %}{{ m.content",
    )
    talk = [*TALK[:3], TALK[3], say("tool", "1"), say("assistant", "2")]
    assert shown(conversations([talk], template), build_character_tokenizer()) == [
        ("u-hi<eos> a-", "==yes<eos>"),
        ("u-hi<eos> a-yes<eos> u-so<eos> a-", "==no<eos>[ t-1<eos> a-]==2<eos>"),
    ]


def test_a_turn_ends_with_the_control_token_that_closes_it():
    """Not also with the end-of-sequence token, which nobody generates there."""
    closed = CLOSING.replace("<eos>", "<unk>")
    assert shown(conversations([TALK], closed), build_character_tokenizer()) == [
        ("u-hi<unk> a-", "yes<unk>[ u-so<unk> a-]no<unk>")
    ]
    opened = "{% for m in messages %}<unk>{{ m.role[0] }}-{{ m.content }}{% endfor %}"
    opened += "{% if add_generation_prompt %}<unk>a-{% endif %}"
    assert shown(conversations([TALK], opened), build_character_tokenizer()) == [
        ("<unk>u-hi<unk>a-", "yes<unk>[u-so<unk>a-]no<eos>")
    ]
    other_end = CLOSING.replace("<eos>", "{{ '<eos>' if loop.last else '<unk>' }}")
    assert shown(conversations([TALK], other_end), build_character_tokenizer()) == [
        ("u-hi<eos> a-", "yes<eos>"),
        ("u-hi<unk> a-yes<unk> u-so<eos> a-", "no<eos>"),
    ]
    other_end = other_end.replace("loop.last", "loop.last and m.role == 'assistant'")
    assert shown(conversations([TALK], other_end), build_character_tokenizer()) == [
        ("u-hi<unk> a-", "yes<eos>"),
        ("u-hi<unk> a-yes<unk> u-so<unk> a-", "no<eos>"),
    ]


def test_a_thought_that_the_generation_prompt_opens_is_learned():
    from agent_cases import merging_tokenizer

    tokenizer = merging_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }}<|end|>\n"
        "{% endfor %}{% if add_generation_prompt %}assistant:<think>\n{% endif %}"
    )
    user = say("user", "1+1")
    for answer in (
        say("assistant", "<think>\neasy\n</think>\n\n2"),
        say("assistant", "2", reasoning_content="easy"),
    ):
        rows = pa.Table.from_pylist([{"messages": [user, answer]}])
        batch = tokenize_conversations(RowReader(tokenizer), rows, "messages")
        assert shown(batch, tokenizer) == [
            ("user:1+1<|end|>\nassistant:<think>\n", "easy\n</think>\n\n2<|end|>")
        ]
    rows = pa.Table.from_pylist([{"messages": [user, say("assistant", "2")]}])
    with pytest.raises(DataError, match=r"opens a thought .*message 2 of row 1 .*has none"):
        tokenize_conversations(RowReader(tokenizer), rows, "messages")


def test_an_empty_thought_of_the_generation_prompt_is_not_learned():
    """`enable_thinking=false`, with a template that writes the empty thought there alone."""
    from agent_cases import merging_tokenizer

    tokenizer = merging_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}:{{ m.content }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant:<think></think>\n{% endif %}"
    )
    rows = pa.table({"messages": [[say("user", "1"), say("assistant", "2")]]})
    batch = tokenize_conversations(RowReader(tokenizer), rows, "messages")
    assert shown(batch, tokenizer) == [("user:1<|end|>assistant:<think></think>\n", "2<|end|>")]
    thoughtful = say("assistant", "<think>so</think>2")
    rows = pa.table({"messages": [[say("user", "1"), thoughtful]]})
    with pytest.raises(DataError, match="in another way than it opens the turn"):
        tokenize_conversations(RowReader(tokenizer), rows, "messages")


def test_a_template_that_rewrites_turns_is_refused_with_a_cure():
    tokenizer = with_template(FORGETFUL)
    batch = examples([{"prompt": TALK[:3], "response": "no"}], tokenizer)
    assert shown(batch, tokenizer) == [("u-hi<eos> a-yes<eos> u-so<eos> a-", "==no<eos>")]
    with pytest.raises(DataError, match=r"message 2 of row 1 .*`data.chat=false`"):
        conversations([TALK[:2]], OTHER_OPENING)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (TALK[:1], "Row 1 .* no message of the role `assistant`"),
        (TALK[1:], "Row 1 .* begins with the assistant's message"),
        ([{"role": "user"}], "`role` and `content`"),
        ("text", "Row 1 .* expected a list of chat messages"),
        ([], "Row 1 .* expected a list of chat messages"),
    ],
)
def test_malformed_conversations_are_named(messages, message):
    with pytest.raises(DataError, match=message):
        conversations([messages], CLOSING)


def test_contradictions_are_named(tokenizer):
    with pytest.raises(ConfigError, match="has no chat template"):
        tokenize_conversations(RowReader(tokenizer), pa.table({"messages": [TALK]}), "messages")
    with pytest.raises(DataError, match=r"`response`, but `data.chat` is false"):
        examples([{"prompt": "a", "response": TALK[1:2]}], with_template(CLOSING), chat=False)
    with pytest.raises(ConfigError, match=r"`data.system_prompt` is set"):
        examples([{"prompt": "a", "response": "b"}], tokenizer, system_prompt="be")


def test_lengths_are_limited(tokenizer, caplog):
    rows = [{"prompt": "abcde", "response": "a"}, {"prompt": "ab", "response": "abcd"}]
    rows += [{"prompt": "abc", "response": "abc"}]
    with pytest.raises(DataError, match=r"Row 1 .* 5 tokens, more than `data.max_prompt_tokens`"):
        examples(rows, tokenizer, max_prompt_tokens=4)
    with pytest.raises(DataError, match=r"Row 2 .* a response of 5 tokens.*max_response_tokens"):
        examples(rows, tokenizer, max_response_tokens=4)
    limits = {"max_prompt_tokens": 4, "max_response_tokens": 4, "too_long": "drop"}
    assert shown(examples(rows, tokenizer, **limits), tokenizer) == [("abc", "abc<eos>")]
    assert "Dropped 1 of 3 responses" in caplog.text
    with pytest.raises(DataError, match="dropped all rows"):
        examples(rows[:2], tokenizer, **limits)


@pytest.mark.parametrize(
    "messages",
    [
        [say("user", "2"), {"role": "assistant", "tool_calls": [{"name": "3", "arguments": {}}]}],
        [{"from": "human", "value": "2"}, {"from": "gpt", "value": "3"}],
    ],
)
def test_conversations_as_json_in_texts_are_those_that_lists_are(messages):
    template = CLOSING.replace(
        "<eos>", "{% for c in m.tool_calls %}{{ c.function.name }}{% endfor %}<eos>"
    )
    batch = conversations([json.dumps(messages)], template)
    assert shown(batch, with_template(template)) == [("u-2<eos> a-", "3<eos>")]


def test_responses_of_sharegpt_say_something():
    rows = [{"prompt": [say("user", "2")], "response": [{"from": "gpt", "value": "3"}]}]
    batch = examples(rows, with_template(CLOSING))
    assert shown(batch, with_template(CLOSING)) == [("u-2<eos> a-", "3<eos>")]
