"""Templates as models have them: what data and the endpoint make of conversations, by hand."""

import copy
import json

import pytest
from conversation_cases import DATE, read_cases, tokenizer_of

from hybridrl.config.schema import DataConfig
from hybridrl.conversations.rendering import TemplateContext
from hybridrl.data.datasets import load_rows
from hybridrl.errors import DataError
from hybridrl.serving.agent_session import TurnTokens
from hybridrl.serving.renderer_chat import choose_renderer
from hybridrl.serving.request_parsing import ApiError, ChatCompletionRequest, parse
from hybridrl.serving.template_chat import ConversationError

CASES = read_cases()
SHOWN = [case for case in CASES if case.rows and case.learn is None]
REFUSED = [case for case in CASES if case.refusal]


def written(path, case, **columns):
    """The rows of a case in a file, beside a row with calls of other functions: as JSON lines."""
    row = columns | ({"tools": case.tools} if case.tools else {})
    path.write_text(json.dumps(row) + "\n")
    return DataConfig(
        path=str(path), chat_template_options=case.options, date=DATE, max_prompt_tokens=10_000
    )


def marked(batch, tokenizer):
    """Each row as text, with what is learned in ⟦ and ⟧."""
    columns = [batch[name].rows() for name in ("prompt_ids", "response_ids", "response_mask")]
    found = []
    for prompt, response, mask in zip(*columns, strict=True):
        text, learned = tokenizer.decode(prompt), False
        stretch = []
        for token, is_learned in [*zip(response.tolist(), mask.tolist(), strict=True), (None, 0)]:
            if bool(is_learned) != learned:
                text += tokenizer.decode(stretch) + ("⟧" if learned else "⟦")
                learned, stretch = bool(is_learned), []
            stretch += [] if token is None else [token]
        found.append(text + tokenizer.decode(stretch))
    return found


@pytest.mark.parametrize("case", [case for case in CASES if case.rows], ids=str)
def test_what_is_learned_is_what_the_hand_wrote(case, tmp_path):
    config = written(tmp_path / "rows.jsonl", case, messages=case.messages)
    config.messages_column = "messages"
    config.learn = case.learn or config.learn
    tokenizer = tokenizer_of(case.template)
    batch = load_rows("examples", config, tokenizer, held_out=0, seed=0).training
    assert marked(batch, tokenizer) == case.rows


@pytest.mark.parametrize("case", SHOWN, ids=str)
def test_a_prompt_has_the_same_tokens_in_data_and_at_the_endpoint(case, tmp_path):
    tokenizer = tokenizer_of(case.template)
    expected = tokenizer(case.prompt, add_special_tokens=False)["input_ids"]
    config = written(tmp_path / "rows.jsonl", case, prompt=case.messages[:-1], answer="4")
    batch = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training
    assert batch["prompt"] == [case.prompt]
    assert batch["prompt_ids"].rows()[0].tolist() == expected
    if case.conversation == "unknown role":  # no client of OpenAI's API sends one
        return
    body = {"messages": copy.deepcopy(case.messages[:-1]), "tools": case.tools}
    asked = parse(ChatCompletionRequest, body | {"chat_template_kwargs": case.options})
    context = TemplateContext.of({}, DATE)
    chat = choose_renderer(tokenizer, case.template, context).with_options(asked.options)
    assert chat.prompt(asked.conversation, asked.functions) == expected
    of_job = choose_renderer(tokenizer, case.template, context.with_options(case.options))
    assert of_job.prompt(asked.conversation, asked.functions) == expected


@pytest.mark.parametrize("case", SHOWN, ids=str)
def test_a_prompt_that_is_rendered_already_gets_no_second_bos(case, tmp_path):
    tokenizer = tokenizer_of(case.template)
    config = written(tmp_path / "rows.jsonl", case, prompt=case.prompt, answer="4")
    config.chat_template_options = {}
    batch = load_rows("prompts", config, tokenizer, held_out=0, seed=0).training
    expected = tokenizer(case.prompt, add_special_tokens=False)["input_ids"]
    assert batch["prompt_ids"].rows()[0].tolist()[-len(expected) :] == expected
    bos = tokenizer.bos_token_id
    assert batch["prompt_ids"].rows()[0].tolist().count(bos) == max(
        expected.count(bos), bos is not None
    )


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_what_the_template_does_not_show_is_refused(case, tmp_path):
    tokenizer = tokenizer_of(case.template)
    config = written(tmp_path / "rows.jsonl", case, messages=case.messages)
    config.messages_column = "messages"
    with pytest.raises(DataError, match=f"(?is)row 1 .*{case.refusal}"):
        load_rows("examples", config, tokenizer, held_out=0, seed=0)
    if case.conversation != "unknown role" or case.refusal != "alternate":  # it does, in a prompt
        config = written(tmp_path / "rows.jsonl", case, prompt=case.messages[:-1], answer="4")
        with pytest.raises(DataError, match=f"(?is)row 1 .*{case.refusal}"):
            load_rows("prompts", config, tokenizer, held_out=0, seed=0)
    if case.template in ("alternating", "gemma", "mistral") or case.conversation == "unknown role":
        with pytest.raises((ApiError, ConversationError)):
            asked = parse(
                ChatCompletionRequest, {"messages": case.messages[:-1], "tools": case.tools}
            )
            choose_renderer(tokenizer, case.template).prompt(asked.conversation, asked.functions)


GOES_ON = [case for case in SHOWN if len(case.rows) == 1 and case.rows[0].count("⟦") > 1]


@pytest.mark.parametrize("case", GOES_ON, ids=str)
def test_a_conversation_that_goes_on_has_the_same_tokens_in_data_and_at_the_endpoint(
    case, tmp_path
):
    """What the model is shown after its own tokens of an earlier turn is what data would have."""
    tokenizer = tokenizer_of(case.template)
    config = written(tmp_path / "rows.jsonl", case, messages=case.messages)
    config.messages_column = "messages"
    rows = load_rows("examples", config, tokenizer, held_out=0, seed=0).training
    prompt, response, mask = (
        rows[name].rows()[0].tolist() for name in ("prompt_ids", "response_ids", "response_mask")
    )
    first = mask.index(0)
    last = len(mask) - mask[::-1].index(0)
    asked = parse(ChatCompletionRequest, {"messages": case.messages[:-1], "tools": case.tools})
    chat = choose_renderer(tokenizer, case.template, TemplateContext.of({}, DATE))
    at = max(n for n, message in enumerate(asked.conversation) if message["role"] == "assistant")
    known = TurnTokens(prompt, response[:first])
    found = chat.continuation(asked.conversation, asked.functions, at, known)
    assert found == [*prompt, *response[:last]]
