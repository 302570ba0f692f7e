"""Chats: messages become tokens, and a conversation that goes on keeps those that were sampled."""

import json
from functools import partial

import pytest
from agent_cases import TEMPLATES, WEATHER, letters, merging_tokenizer

from hybridrl.conversations.messages import read_messages
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.serving.agent_session import TurnTokens
from hybridrl.serving.messages import AssistantTurn, compute_conversation_key
from hybridrl.serving.renderer_chat import LibraryRenderer, choose_renderer
from hybridrl.serving.template_chat import ConversationError, TemplateRenderer

CALL = '<tool_call>{"name": "weather",\n "arguments": {"place": "there"}}</tool_call>'
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the weather?"}]
SUNNY = {"role": "tool", "tool_call_id": "1", "content": "sunny in the other one"}
GO_ON = {"role": "user", "content": "and then?"}


@pytest.fixture(params=TEMPLATES)
def chat(request):
    return TemplateRenderer(merging_tokenizer(request.param))


def text_of(chat, token_ids):
    return chat.tokenizer.decode(token_ids, skip_special_tokens=False)


def rendered(chat, messages, tools=()):
    return chat._text(messages, tools, ask=True)


@pytest.mark.parametrize("end", ["<|end|>", ""])
@pytest.mark.parametrize("new", [[GO_ON], [GO_ON, GO_ON]])
def test_the_tokens_that_were_sampled_stay(chat, end, new):
    prompt_ids = chat.prompt(QUESTION, [])
    sampled = letters(chat.tokenizer, f"then or in the other{end}")
    said = chat.said(sampled, prompt_ids, [])
    messages = [*QUESTION, said.message([]), *new]
    found = chat.continuation(messages, [], 2, TurnTokens(prompt_ids, sampled))
    kept = len(prompt_ids) + len(sampled)
    assert found[:kept] == prompt_ids + sampled
    assert text_of(chat, found) == rendered(chat, messages)
    assert chat.prompt(messages, []) != found, "its own tokens would be others"
    assert found[kept:] == chat._tokens(text_of(chat, found[kept:])), "what is new is not cut up"


def test_calls_stay_as_they_were_written(chat):
    prompt_ids = chat.prompt(QUESTION, [WEATHER])
    sampled = letters(chat.tokenizer, f"let us see {CALL}{CALL}<|end|>")
    said = chat.said(sampled, prompt_ids, [WEATHER])
    assert [json.loads(call.arguments) for call in said.calls] == [{"place": "there"}] * 2
    messages = [*QUESTION, said.message(["1", "2"]), SUNNY, SUNNY, GO_ON]
    found = chat.continuation(messages, [WEATHER], 2, TurnTokens(prompt_ids, sampled))
    text = text_of(chat, found)
    before = rendered(chat, QUESTION, [WEATHER])
    assert found[: len(prompt_ids) + len(sampled)] == prompt_ids + sampled
    assert text.startswith(f"{before}let us see {CALL}{CALL}<|end|>")
    assert text.endswith(rendered(chat, messages, [WEATHER]).rpartition("</tool_call>")[2])


def test_a_template_that_leaves_out_what_was_thought_begins_anew():
    chat = TemplateRenderer(merging_tokenizer("chatml"))
    prompt_ids = chat.prompt(QUESTION, [])
    sampled = letters(chat.tokenizer, "<think>hm</think>in there<|end|>")
    message = chat.said(sampled, prompt_ids, []).message([])
    assert message["content"] == "<think>hm</think>in there"
    assert (
        chat.continuation([*QUESTION, message, GO_ON], [], 2, TurnTokens(prompt_ids, sampled))
        is None
    )
    plain = TemplateRenderer(merging_tokenizer("plain"))
    assert plain.continuation([*QUESTION, message, GO_ON], [], 2, TurnTokens(prompt_ids, sampled))


def test_what_is_no_call_stays_text(chat):
    for text in ("<tool_call>{", "<tool_call>[1]</tool_call>", "<tool_call>{}</tool_call>"):
        said = chat.said(letters(chat.tokenizer, f"a {text}<|end|>"), [], [WEATHER])
        assert said == AssistantTurn(f"a {text}")
    both = f"<tool_call>no</tool_call>{CALL}"
    said = chat.said(letters(chat.tokenizer, both), [], [WEATHER])
    assert said.content == "<tool_call>no</tool_call>" and len(said.calls) == 1
    open_end = letters(chat.tokenizer, CALL.removesuffix("</tool_call>"))
    assert len(chat.said(open_end, [], [WEATHER]).calls) == 1


def test_a_template_that_refuses_says_so():
    tokenizer = merging_tokenizer("plain")
    tokenizer.chat_template = "{{ raise_exception('No system here') }}"
    with pytest.raises(ConversationError, match="No system here"):
        TemplateRenderer(tokenizer).prompt(QUESTION, [])


def test_conversations_that_mean_the_same_have_one_name():
    key = partial(compute_conversation_key, tools=())

    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    same = {"id": "y", "type": "function", "function": {"name": "f", "arguments": '{ "a":1}'}}
    said = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "z"}
    assert key([said]) == key([{"role": "assistant", "content": "", "tool_calls": [same]}])
    other = same | {"function": {"name": "f", "arguments": '{"a": 2}'}}
    assert key([said]) != key([said | {"tool_calls": [other]}])
    assert key([GO_ON], options={"a": 1}) != key([GO_ON], options={"a": 2})
    assert key([GO_ON]) != key([GO_ON], tools=[WEATHER]) and key([GO_ON]) != key([GO_ON, GO_ON])
    assert read_messages([said])[0]["tool_calls"][0]["function"]["arguments"] == {"a": 1}


QWEN = TEMPLATES["chatml"].replace("<|end|>", "<|im_end|>")
THOUGHT = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def qwen_tokenizer():
    """With what the renderer of Qwen3 wants to find."""
    from renderers import Qwen3RendererConfig, create_renderer

    tokenizer = merging_tokenizer("chatml")
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>"})
    tokenizer.add_tokens([*THOUGHT, "<tool_response>", "</tool_response>", "<|endoftext|>"])
    tokenizer.chat_template = QWEN
    return tokenizer, create_renderer(tokenizer, Qwen3RendererConfig())


def test_a_renderer_thinks_calls_and_keeps_tokens():
    tokenizer, renderer = qwen_tokenizer()
    chat = LibraryRenderer(renderer, TemplateRenderer(tokenizer), "qwen3")
    assert tokenizer.eos_token_id in chat.stop_token_ids
    prompt_ids = chat.prompt(QUESTION, [WEATHER])
    text = f"<think>hm</think>\n\nin there\n{CALL}<|im_end|>"
    sampled = [
        token
        for part in text.replace("<", " <").replace(">", "> ").split(" ")
        for token in tokenizer(part, add_special_tokens=False)["input_ids"]
    ]
    said = chat.said(sampled, prompt_ids, [WEATHER])
    assert said.reasoning == "hm" and said.calls[0].name == "weather"
    messages = [*QUESTION, said.message(["1"]), SUNNY]
    found = chat.continuation(messages, [WEATHER], 2, TurnTokens(prompt_ids, sampled))
    assert found[: len(prompt_ids) + len(sampled)] == prompt_ids + sampled
    assert "sunny" in tokenizer.decode(found[len(prompt_ids) + len(sampled) :])


def agreeing_template():
    """Writes messages and tools as Qwen3's does, but for what is thought and called."""
    from renderers import qwen3

    head, foot = (json.dumps(text) for text in (qwen3._TOOLS_HEADER, qwen3._TOOLS_FOOTER))
    return f"""\
{{%- set asked = messages[0].role == 'system' %}}
{{%- if tools %}}{{{{ '<|im_start|>system\\n' }}}}{{% if asked %}}
{{{{- messages[0].content + '\\n\\n' }}}}{{% endif %}}{{{{ {head} }}}}
{{%- for tool in tools %}}{{{{ '\\n' + tool | tojson }}}}{{% endfor %}}
{{{{- {foot} + '<|im_end|>\\n' }}}}{{% endif %}}
{{%- for message in (messages[1:] if tools and asked else messages) %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endfor %}}{{% if add_generation_prompt %}}{{{{ '<|im_start|>assistant\\n' }}}}{{% endif %}}"""


def test_a_renderer_is_taken_by_name_if_it_agrees_with_the_template():
    tokenizer, _ = qwen_tokenizer()
    assert isinstance(choose_renderer(tokenizer, "unknown/model"), TemplateRenderer)
    assert isinstance(choose_renderer(tokenizer, "somewhere/Qwen3-0.6B"), TemplateRenderer), (
        "another template"
    )
    tokenizer.chat_template = agreeing_template()
    assert isinstance(choose_renderer(tokenizer, "/models/Qwen/Qwen3-0.6B/"), LibraryRenderer)
    tokenizer.chat_template = None
    assert choose_renderer(tokenizer, "m") is None


OFF = {"enable_thinking": False}
SWITCHED_OFF = """{% if enable_thinking is defined and not enable_thinking %}\
{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"""


def test_a_renderer_has_the_options_of_the_job_and_of_a_request():
    tokenizer, _ = qwen_tokenizer()
    template = agreeing_template()
    tokenizer.chat_template = template.removesuffix("{% endif %}") + SWITCHED_OFF
    chat = choose_renderer(tokenizer, "Qwen3-0.6B")
    assert isinstance(chat, LibraryRenderer)
    switched = chat.with_options(OFF)
    of_job = choose_renderer(tokenizer, "Qwen3-0.6B", TemplateContext(options=OFF))
    for one in (switched, of_job):
        prompt = tokenizer.decode(one.prompt(QUESTION, []))
        assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")
        sampled = tokenizer("in there<|im_end|>", add_special_tokens=False)["input_ids"]
        known = TurnTokens(one.prompt(QUESTION, []), sampled)
        messages = [*QUESTION, one.said(sampled, known.prompt_ids, []).message([]), GO_ON]
        found = tokenizer.decode(one.continuation(messages, [], 2, known))
        assert found.startswith(f"{prompt}in there<|im_end|>")
        assert found.endswith("assistant\n<think>\n\n</think>\n\n")
    again = of_job.with_options({"enable_thinking": True})
    assert again.prompt(QUESTION, []) == chat.prompt(QUESTION, [])
    with pytest.raises(
        ConversationError, match=r"chat_template_kwargs.thinks: .* reads enable_thinking"
    ):
        chat.with_options({"thinks": 1})
