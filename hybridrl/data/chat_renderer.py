"""ChatRenderer: conversations of data as prompts, and as answers cut out of what precedes them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hybridrl.conversations.messages import Message, ToolSchema, read_tools
from hybridrl.conversations.rendering import (
    ChatTemplateError,
    TemplateContext,
    check_options,
    render_chat,
    template_sources,
    template_variables,
)
from hybridrl.data.encoding import quote_excerpt, shorten_value, special_token_pattern
from hybridrl.data.message_cells import check_no_nul
from hybridrl.data.row_origin import DataRow, RowOrigin
from hybridrl.errors import RowError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hybridrl.data.refused_rows import RefusedRows

_THOUGHTS = {"reasoning_content", "reasoning", "thinking"}
"""Keys under which messages have what the model thought."""
_MARK = "hybridrl5e27mark"
"""Stands in the place of a content, to be looked for in what the template makes of it."""


class _Conversation(NamedTuple):
    row: DataRow
    messages: list[Message]
    tools: list[ToolSchema]

    def up_to(self, place: int) -> _Conversation:
        """Return the conversation before the message of this number."""
        return self._replace(messages=self.messages[:place])


class ChatRenderer:
    """Renders the conversations of a table by the tokenizer's chat template.

    Args:
        context: Options of the template, and the date of the run.
        tools_column: Of `tools`, for messages.
        learn: Which answers of a conversation are learned, `all`, `last` or `each`.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        context: TemplateContext,
        tools_column: str | None,
        learn: str,
        origin: RowOrigin,
    ) -> None:
        self._tokenizer, self._context = tokenizer, context
        self._column, self._learn, self._origin = tools_column, learn, origin
        self._closes = re.compile(rf"(?:{special_token_pattern(tokenizer).pattern})(?=\s*\Z)")
        self._shown: set[Any] = set()
        self._counts: Counter[str] = Counter()
        check_options(context.options, tokenizer, origin / "chat_template_options")

    def note_unshown(self, cell: Any) -> None:
        """Count a row whose tools no template shows, because its prompt is plain text."""
        self._counts["unshown"] += bool(cell)

    def prompt(self, row: DataRow, messages: list[Message], tools: Any) -> str:
        """Return the conversation, followed by what opens the assistant's next turn.

        Args:
            tools: The row's cell of `data.tools_column`.

        Raises:
            DataError: naming the row, if the template refuses it or leaves a message out, or if
                the text of a message holds a control token, which would end or begin turns that
                nobody has taken.
        """
        talk = _Conversation(row, messages, self._read_tools(row, tools))
        self._check(talk, ask=True)
        return self._text(talk, ask=True)

    def examples(
        self, row: DataRow, messages: list[Message], answers: Sequence[int], tools: Any
    ) -> list[list[str]]:
        """Render a conversation and cut it where the messages with the numbers `answers` begin
        and end.

        An answer is what the model has to write after the generation prompt, up to the control
        token that closes its turn; where the template closes none, the end-of-sequence token
        follows the last one. An answer is learned in a rendering of the whole only if it stands
        there as it would be generated, with the same text before it. Templates that leave out
        earlier thoughts, or end the last turn in another way, need several renderings.

        Returns:
            For each rendering its pieces in turn: what precedes the first answer, that answer,
            what stands between it and the next one, and so on to the last answer.

        Raises:
            DataError: as `prompt`, and if an answer does not go on from the generation prompt.
        """
        left = list(answers[-1:] if self._learn == "last" else answers)
        talk = _Conversation(row, messages, self._read_tools(row, tools))
        self._check(talk.up_to(left[-1] + 1), ask=False)
        turns = {place: self._turn(talk, place) for place in left}
        found: list[list[str]] = []
        while left:
            whole = "".join(turns[left[-1]])
            pieces, others, position = list[str](), list[int](), 0
            for place in left:
                before, answer = turns[place]
                end = len(before) + len(answer)
                is_last = place == left[-1]
                fits = whole.startswith(before + answer) and position <= len(before)
                if not is_last and (self._learn == "each" or not fits):
                    others.append(place)
                    continue
                if not self._closes.search(answer):
                    answer += self._end(whole, end)
                pieces += [whole[position : len(before)], answer]
                position = len(before) + len(answer)
            found.append(pieces)
            left = others
        if len(found) > 1 and self._learn == "all":
            self._counts["conversations"] += 1
            self._counts["renderings"] += len(found)
        return found[::-1]

    def tell(self, refused: RefusedRows) -> None:
        """Log what the template does not show the model.

        Args:
            refused: Of the rows that it has rendered.
        """
        name, counts = self._tokenizer.name_or_path, self._counts
        refused.warn(
            "%d conversations became %d rows, for the chat template of `%s` does not show all "
            "their answers as the model generates them (it leaves out earlier thoughts, say). "
            "%s=last learns the last answer of each alone.",
            (counts["conversations"], counts["renderings"]),
            name,
            self._origin / "learn",
        )
        shows = "tools" in template_variables(self._tokenizer)
        if shows:
            refused.warn("%d rows have tools, which their prompts show.", [counts["tools"]])
        if unshown := counts["unshown"] + (0 if shows else counts["tools"]):
            cause = "the prompts are plain text"
            if not counts["unshown"]:
                cause = f"the chat template of `{name}` does not read them"
            refused.warn(
                "%d rows have tools in the column `%s` (`%s`) that the model is not shown: %s.",
                [unshown],
                self._column,
                self._origin / "tools_column",
                cause,
            )
        for key in sorted(_THOUGHTS & counts.keys()):
            refused.warn(
                "%d rows have messages with `%s`, which the chat template of `%s` does not read, "
                "so the model does not see it.",
                [counts[key]],
                key,
                name,
            )
        refused.warn(
            "%d rows call tools that their prompts do not have, so the model learns to call "
            "functions that it is not shown. Name the column of the tools by %s.",
            [counts["calls"]],
            self._origin / "tools_column",
        )

    def _read_tools(self, row: DataRow, cell: Any) -> list[ToolSchema]:
        """Return the functions of a cell of `data.tools_column`; refuse anything else."""
        try:
            return read_tools(cell)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RowError(
                f"{row} has {shorten_value(cell)} in the column `{self._column}` "
                f"(`{row / 'tools_column'}`), expected a list of functions with names, as objects "
                f"or JSON text. If the column is something else, set {row / 'tools_column'}=null.",
                "with malformed tools",
            ) from error

    def _turn(self, talk: _Conversation, place: int) -> tuple[str, str]:
        """Return what the model reads before it generates an answer, and the answer up to its
        end."""
        before = self._text(talk.up_to(place), ask=True)
        after = self._text(talk.up_to(place + 1), ask=False)
        if after.startswith(before) and len(after) > len(before):
            answer = after[len(before) :]
        else:
            answer = self._changed_answer(talk, place, before, after)
        closed = self._closes.search(answer)
        return before, answer[: closed.end()] if closed else answer

    def _changed_answer(self, talk: _Conversation, place: int, before: str, after: str) -> str:
        """Return the answer of a template that does not render it behind the generation prompt: it
        ends the message before in another way, or its generation prompt has an empty thought or
        opens one, and it leaves thoughts out when it renders the answer.

        Args:
            before, after: The renderings up to the answer and with it.
        """
        row, message = talk.row, talk.messages[place]
        plain = {"role": message["role"], "content": _MARK}
        marked = talk._replace(messages=[*talk.messages[:place], plain])
        text = self._text(marked, ask=False)
        head, mark, tail = text.partition(_MARK)
        header = before.removeprefix(self._text(talk.up_to(place), ask=False))
        is_same = mark and header not in ("", before) and head.endswith(header)
        if is_same and after.startswith(head):
            return after[len(head) :]
        opened = before[len(head) :] if mark and before.startswith(head) else ""
        empty = re.fullmatch(r"\s*<(\w+)>\s*</\1>\s*", opened)
        if empty and after.startswith(head):
            answer = after[len(head) :]
            if not answer.lstrip().startswith(f"<{empty[1]}>"):
                return answer
        tag = re.fullmatch(r"\s*<(\w+)>\s*", opened)
        if tag is None or message.get("tool_calls"):
            raise RowError(
                f"The chat template of `{self._tokenizer.name_or_path}` renders message "
                f"{place + 1} of row {row.number} of {row.origin.rows} in another way than it "
                f"opens the turn to generate it: {quote_excerpt(before[-40:])} is followed by no "
                f"answer in {quote_excerpt(text[-80:])}. Set `{row / 'chat_template_options'}` "
                "such that they agree, or give the response as a string and the prompt as rendered "
                f"text, with `{row / 'chat'}=false`.",
                "whose turns the chat template does not keep apart",
            )
        said: str = message["content"].lstrip()
        if (thought := message.get("reasoning_content")) is not None:
            said = f"{opened.lstrip()}{thought.strip()}\n</{tag[1]}>\n\n{message['content']}"
        if not said.startswith(f"<{tag[1]}>"):
            raise RowError(
                f"The chat template of `{self._tokenizer.name_or_path}` opens a thought for the "
                f"model to write, and message {place + 1} of row {row.number} of {row.origin.rows} "
                "has none. Give it as `reasoning_content`, or switch thoughts off by "
                f"`{row / 'chat_template_options'}`, if the template can.",
                "without the thought that the chat template opens",
            )
        exact = opened.lstrip()
        return said.removeprefix(exact if said.startswith(exact) else f"<{tag[1]}>") + tail

    def _end(self, whole: str, end: int) -> str:
        """Return what ends an answer that its turn does not close: the control token that opens the
        next one, or at the end of the conversation that of the end of a sequence."""
        if end == len(whole):
            return str(self._tokenizer.eos_token or "")
        follows = special_token_pattern(self._tokenizer).match(whole, end)
        return follows.group() if follows else ""

    def _check(self, talk: _Conversation, *, ask: bool) -> None:
        """Refuse control tokens in texts, and messages that the template leaves out. The latter are
        looked for once for each order of roles."""
        row, messages, tools = talk
        name = self._tokenizer.name_or_path
        for message in messages:
            for text in _texts_of({key: v for key, v in message.items() if key != "role"}):
                check_no_nul(row, text, "messages", "content")
                if found := special_token_pattern(self._tokenizer).search(text):
                    raise RowError(
                        f"{row} has `{found.group()}` in the text of a message of the role "
                        f"`{message['role']}`, which is a control token of the tokenizer `{name}`: "
                        "the model would not read it as text. Remove it, or write it otherwise.",
                        "with a control token in a message",
                    )
        calls = any(message.get("tool_calls") for message in messages)
        self._counts["tools"] += bool(tools)
        self._counts["calls"] += calls and not tools
        template = "".join(template_sources(self._tokenizer))
        thoughts = {key for m in messages for key in _THOUGHTS & m.keys()}
        self._counts.update(key for key in thoughts if key not in template)
        shape = (*((m["role"], len(m.get("tool_calls", ()))) for m in messages), bool(tools), ask)
        if shape in self._shown:
            return
        if (left_out := self._left_out(talk, ask)) is not None:
            role = messages[left_out]["role"]
            what = "a call of a tool in a message" if calls and role == "assistant" else "a message"
            raise RowError(
                f"{row} has {what} of the role `{role}`, which the chat template of `{name}` "
                "leaves out, so that the model would not see it. Give it a role that the template "
                "knows, or leave it out.",
                "with a message that the chat template leaves out",
            )
        self._shown.add(shape)

    def _left_out(self, talk: _Conversation, ask: bool) -> int | None:
        """Return the number of the first message that the template leaves out, itself or one of its
        calls: each gets a mark to look for in the text."""
        marked, marks = [], list[tuple[int, str]]()
        for place, message in enumerate(talk.messages):
            calls = message.get("tool_calls", [])
            names = [f"{_MARK}{place}x{n}x" for n in range(len(calls))] or [f"{_MARK}{place}x"]
            marks += [(place, name) for name in names]
            if calls:
                named = zip(calls, names, strict=True)
                calls = [c | {"function": c["function"] | {"name": name}} for c, name in named]
                marked.append(message | {"tool_calls": calls})
            else:
                marked.append(message | {"content": names[0]})
        try:
            text = self._text(talk._replace(messages=marked), ask=ask)
        except RowError:  # of the marks; the messages themselves may be well
            return None
        return next((place for place, mark in marks if mark not in text), None)

    def _text(self, talk: _Conversation, *, ask: bool) -> str:
        row, messages, tools = talk
        context = self._context.with_tools(tools) if tools else self._context
        try:
            return render_chat(self._tokenizer, messages, context, ask=ask)
        except ChatTemplateError as error:
            raise RowError(
                f"The chat template of `{self._tokenizer.name_or_path}` refuses row {row.number} "
                f"of {row.origin.rows}: {error}",
                "that the chat template refuses",
            ) from error


def _texts_of(value: Any) -> Iterator[str]:
    """Yield all texts in a value of JSON, at every depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts_of(one)
