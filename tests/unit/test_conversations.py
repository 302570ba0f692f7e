"""Messages and tools as data has them reach the chat template as they are meant."""

import datetime
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from agent_cases import WEATHER, merging_tokenizer

from hybridrl.config.schema import DataConfig
from hybridrl.conversations.messages import read_messages, read_tools
from hybridrl.conversations.rendering import TemplateContext, render_chat
from hybridrl.data.datasets import load_rows
from hybridrl.data.preference_pairs import tokenize_preference_pairs
from hybridrl.data.prompts import tokenize_prompts
from hybridrl.data.row_reader import RowReader
from hybridrl.data.supervised_tokens import tokenize_conversations
from hybridrl.errors import ConfigError, DataError
from hybridrl.serving.template_chat import TemplateRenderer

OTHER = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "the weather?"}


def call(name, arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def talk(arguments, name="weather"):
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call(name, arguments)]}]


@pytest.fixture(scope="module")
def tokenizer():
    return merging_tokenizer("plain")


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return DataConfig(path=str(path), messages_column="messages", answer_column=None)


def texts(batch, tokenizer, name="response_ids"):
    return [tokenizer.decode(ids) for ids in batch[name].rows()]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_a_call_has_its_own_arguments_only(tokenizer, tmp_path, name):
    rows = [
        {"messages": talk({"place": "Bern"})},
        {"messages": talk({"query": "x", "top": 3}, "find")},
    ]
    found = load_rows(
        "examples", write(tmp_path / name, rows), tokenizer, held_out=0, seed=0
    ).training
    assert texts(found, tokenizer) == [
        '<tool_call>{"name": "weather", "arguments": {"place": "Bern"}}</tool_call><|end|>',
        '<tool_call>{"name": "find", "arguments": {"query": "x", "top": 3}}</tool_call><|end|>',
    ]


def test_conversations_as_json_text(tokenizer, caplog):
    table = pa.table({"messages": [json.dumps(talk({"place": "Bern"}))], "tools": [[WEATHER]]})
    assert (
        '"place": "Bern"'
        in texts(tokenize_conversations(RowReader(tokenizer), table, "messages"), tokenizer)[0]
    )
    assert "JSON in texts" not in caplog.text


def test_all_rows_of_a_conversation_are_on_one_side(tmp_path):
    tokenizer = merging_tokenizer("chatml")
    rows = []
    for number in range(10):
        turns = [{"role": "user", "content": str(number)}, {"role": "assistant", "content": "a"}]
        rows.append({"messages": turns * 2})
    config = write(tmp_path / "rows.jsonl", rows)
    split = load_rows("examples", config, tokenizer, held_out=4, seed=0)
    assert len(split.training) == 16 and len(split.held_out) == 4
    sides = [set(side["conversation_number"].tolist()) for side in (split.training, split.held_out)]
    assert not sides[0] & sides[1] and sides[0] | sides[1] == set(range(10))


def test_thoughts_that_the_template_never_reads_are_told_of(tokenizer, caplog):
    thoughtful = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    tokenize_conversations(
        RowReader(tokenizer), pa.table({"messages": [[USER, thoughtful]]}), "messages"
    )
    assert "1 rows have messages with `reasoning_content`" in caplog.text


def test_json_lines_keep_types_and_order_of_keys(tokenizer, tmp_path):
    """An Arrow struct has one type and one place for each key."""
    arguments = [{"a": 1, "b": "x"}, {"b": 2.5, "a": "y"}, {"b": [1, None], "c": {}}]
    rows = [{"messages": talk(one)} for one in arguments]
    found = load_rows(
        "examples", write(tmp_path / "a.jsonl", rows), tokenizer, held_out=0, seed=0
    ).training
    assert [
        json.dumps(one) in text
        for one, text in zip(arguments, texts(found, tokenizer), strict=True)
    ] == [True] * 3


@pytest.mark.parametrize(
    "arguments", [{"place": "Bern"}, '{"place": "Bern"}', {"place": "Bern", "day": None}]
)
def test_data_and_endpoint_read_the_same_tokens(tokenizer, arguments):
    rows = pa.Table.from_pylist([{"messages": talk(arguments), "tools": json.dumps([WEATHER])}])
    batch = tokenize_conversations(RowReader(tokenizer), rows, "messages")
    whole = TemplateRenderer(tokenizer)
    asked = whole.prompt([USER], [WEATHER])
    assert batch["prompt_ids"].rows()[0].tolist() == asked
    after = whole.prompt([*talk(arguments), {"role": "tool", "content": "x"}], [WEATHER])
    text = tokenizer.decode(after)
    assert text.startswith(tokenizer.decode(asked) + texts(batch, tokenizer)[0])


@pytest.mark.parametrize(
    "listed",
    [[WEATHER], json.dumps([WEATHER]), [json.dumps(WEATHER)], json.dumps([WEATHER["function"]])],
)
def test_tools_reach_the_template(tokenizer, tmp_path, listed):
    asked = render_chat(tokenizer, [USER], TemplateContext(tools=[WEATHER]), ask=True)
    assert '"name": "weather"' in asked
    table = pa.Table.from_pylist([{"p": [USER], "tools": listed, "fns": listed}])
    batch = tokenize_prompts(
        RowReader(tokenizer, DataConfig(max_prompt_tokens=400)),
        table,
        prompt_column="p",
        answer_column=None,
    )
    assert batch["prompt"] == [asked]
    assert batch["tools"] == [listed]
    rest = {"p": [USER], "chosen": "a", "rejected": "b", "fns": listed}
    pairs = tokenize_preference_pairs(
        RowReader(tokenizer, DataConfig(tools_column="fns")),
        pa.Table.from_pylist([rest]),
        "p",
        "chosen",
        "rejected",
    )
    assert texts(pairs, tokenizer, "prompt_ids") == [asked]
    config = write(tmp_path / "a.jsonl", [{"prompt": [USER], "tools": listed}] * 2)
    assert (
        load_rows("prompts", config, tokenizer, held_out=0, seed=0).training["prompt"][0] == asked
    )
    config.tools_column = None
    assert (
        'weather"'
        not in load_rows("prompts", config, tokenizer, held_out=0, seed=0).training["prompt"][0]
    )


def test_reward_functions_get_the_tools_as_objects(tokenizer, tmp_path):
    rows = [{"prompt": [USER], "tools": [tool]} for tool in (WEATHER, OTHER)]
    batch = load_rows(
        "prompts", write(tmp_path / "a.jsonl", rows), tokenizer, held_out=0, seed=0
    ).training
    assert [row["tools"] for row in batch.rows_for_users()] == [[WEATHER], [OTHER]]


def test_tools_of_parquet_have_no_empty_keys(tokenizer, tmp_path):
    rows = [{"prompt": [USER], "tools": [tool]} for tool in (WEATHER, OTHER)]
    config = write(tmp_path / "a.parquet", rows)
    prompts = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training["prompt"]
    assert "null" not in "".join(prompts) and '"name": "find"' in prompts[1]


def test_tools_that_nobody_sees_are_told_of(tokenizer, caplog):
    def prompts(row, tokenizer=tokenizer):
        table = pa.Table.from_pylist([row])
        tokenize_prompts(
            RowReader(tokenizer, DataConfig(max_prompt_tokens=400)),
            table,
            prompt_column="p",
            answer_column=None,
        )
        said, _ = caplog.text, caplog.clear()
        return said

    blind = merging_tokenizer("plain")
    blind.chat_template = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
    assert "1 rows have tools" in prompts({"p": [USER], "tools": [WEATHER]}, blind)
    assert "plain text" in prompts({"p": "a", "tools": "hammer, saw"})
    assert "not shown" in prompts({"p": [*talk({}), {"role": "tool", "content": "x"}]})
    assert "1 rows have tools, which" in prompts({"p": [USER], "tools": [WEATHER]})
    with pytest.raises(DataError, match=r"Row 1 .* column `tools` .*data.tools_column=null"):
        prompts({"p": [USER], "tools": "hammer, saw"})
    with pytest.raises(DataError, match=r"`data.tools_column` is `tool`.*Did you mean `tools`"):
        tokenize_prompts(
            RowReader(tokenizer, DataConfig(max_prompt_tokens=9, tools_column="tool")),
            pa.table({"p": ["a"], "tools": [None]}),
            prompt_column="p",
            answer_column=None,
        )


@pytest.mark.parametrize(
    ("messages", "role"),
    [
        ([{"role": "critic", "content": "a"}, USER], "critic"),
        ([USER, {"role": "system", "content": "u"}, USER], "system"),
        ([*talk({}), {"role": "tool", "content": "1"}], "assistant"),
    ],
)
def test_a_message_that_the_template_skips_is_refused(messages, role):
    tokenizer = merging_tokenizer("plain")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role in ('user', 'assistant', 'tool') or loop.first and "
        "m.role == 'system' %}{{ m.role }}: {{ m.content }}<|end|>{% endif %}{% endfor %}"
    )
    table = pa.Table.from_pylist([{"p": [USER]}, {"p": messages}])
    with pytest.raises(DataError, match=f"Row 2 .* of the role `{role}`, .* leaves out"):
        tokenize_prompts(
            RowReader(tokenizer, DataConfig(max_prompt_tokens=99)),
            table,
            prompt_column="p",
            answer_column=None,
        )


OPTIONS = (
    "{% if reasoning_effort is defined %}{{ reasoning_effort }}|{% endif %}"
    "{{ strftime_now('%d %b %Y') }}|{% for m in messages %}{{ m.content }}|{% endfor %}"
    "{% generation %}{% endgeneration %}"
)


def test_options_and_the_date_of_the_run_reach_the_template(tmp_path):
    tokenizer = merging_tokenizer("plain")
    tokenizer.chat_template = OPTIONS
    config = write(tmp_path / "a.jsonl", [{"prompt": [USER]}] * 2)
    config.chat_template_options = {"reasoning_effort": "low"}
    config.date = "2024-02-29"
    found = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training
    assert found["prompt"][0] == "low|29 Feb 2024|the weather?|"
    config.date = None
    today = datetime.date.today().strftime("%d %b %Y")
    assert (
        today in load_rows("prompts", config, tokenizer, held_out=0, seed=0).training["prompt"][0]
    )


@pytest.mark.parametrize("name", ["resoning_effort", "tools", "tokenize"])
def test_an_option_that_the_template_never_reads_is_refused(tmp_path, name):
    tokenizer = merging_tokenizer("plain")
    tokenizer.chat_template = OPTIONS
    config = write(tmp_path / "a.jsonl", [{"prompt": [USER]}] * 2)
    config.chat_template_options = {name: "low"}
    with pytest.raises(
        ConfigError, match=rf"`?data.chat_template_options.{name}.* reasoning_effort"
    ):
        load_rows("prompts", config, tokenizer, held_out=0, seed=0)


def test_messages_are_read_as_the_wire_has_them():
    said = read_messages(
        [
            {"role": "developer", "content": [{"type": "text", "text": "a"}, "b"], "name": None},
            {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"x": null}'}]},
            {"role": "assistant", "content": "c", "tool_calls": []},
            {"role": "assistant", "content": "", "tool_calls": [call("f", "not json")]},
        ]
    )
    assert said == [
        {"role": "system", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", {"x": None})]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "", "tool_calls": [call("f", "not json")]},
    ]
    assert read_tools(None) == read_tools("[]") == []


def test_a_rendered_prompt_gets_no_second_beginning(caplog):
    from tokenizers import processors

    tokenizer = merging_tokenizer("plain")
    tokenizer.add_special_tokens({"bos_token": "<|begin|>"})
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", begin), ("<|end|>", end)]
    )
    tokenizer.chat_template = "<|begin|>{% for m in messages %}{{ m.content }}{% endfor %}"
    rows = pa.table({"p": ["<|begin|>a", "a", "<|begin|>a<|end|>"]})
    batch = tokenize_prompts(RowReader(tokenizer), rows, "p", None)
    ids = [row.tolist() for row in batch["prompt_ids"].rows()]
    letter = tokenizer.convert_tokens_to_ids("a")
    assert ids == [[begin, letter], [begin, letter], [begin, letter, end]]
    assert "2 of 3 prompts begin with `<|begin|>` already" in caplog.text
    chat = pa.Table.from_pylist([{"p": [{"role": "user", "content": "a"}]}])
    batch = tokenize_prompts(RowReader(tokenizer), chat, "p", None)
    assert batch["prompt_ids"].rows()[0].tolist() == ids[0]
