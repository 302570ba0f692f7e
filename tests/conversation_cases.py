"""Twelve chat templates of the kinds that models have, conversations, and what each template makes
of them, written by hand.

`templates/<name>.jinja` is a template, `templates/<name>.txt` what the reader must make of each
conversation with it: its text, with what is learned between ⟦ and ⟧; several rows are parted by
`--- and`. `refused: <words>` stands for a refusal that has these words. Behind the conversation's
name stand `data.learn` where it is not the default, and options of the template.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

FOLDER = Path(__file__).parent / "templates"
DATE = "2024-07-26"
"""Today, for templates that ask for it."""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def say(role: str, content: str | None, **further: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **further}


QUESTION, ANSWER = say("user", "2+2?"), say("assistant", "4")
CALL = say(
    "assistant",
    None,
    tool_calls=[
        {
            "id": "abcdefgh1",
            "type": "function",
            "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'},
        }
    ],
)
RESULT = say("tool", "4", tool_call_id="abcdefgh1")
THOUGHTFUL = [QUESTION, ANSWER | {"reasoning_content": "easy", "thinking": "easy"}]
CONVERSATIONS = {
    "plain": [QUESTION, ANSWER],
    "system": [say("system", "Be brief."), QUESTION, ANSWER],
    "turns": [QUESTION, ANSWER, say("user", "3+3?"), say("assistant", "6")],
    "tools": [QUESTION, CALL, RESULT, say("assistant", "It is 4.")],
    "thoughts": THOUGHTFUL,
    "thoughts of turns": [
        *THOUGHTFUL,
        say("user", "3+3?"),
        say("assistant", "6", reasoning_content="harder", thinking="harder"),
    ],
    "unknown role": [QUESTION, say("critic", "Check it."), ANSWER],
}


class Family(NamedTuple):
    """The tokens of a tokenizer that are more than characters."""

    special: tuple[str, ...]
    eos: str
    bos: str | None = None
    plain: tuple[str, ...] = ()
    """Added tokens that are no control tokens, as `<think>` is one in Qwen3."""


CHATML = Family(
    ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
    "<|im_end|>",
    plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
)
FAMILIES = {
    "qwen2_5": CHATML,
    "qwen3": CHATML,
    "opens_thought": CHATML,
    "list": CHATML,
    "llama3": Family(
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        "<|begin_of_text|>",
    ),
    "gemma": Family(
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), eos="<eos>", bos="<bos>"
    ),
    "mistral": Family(
        (
            *("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        eos="</s>",
        bos="<s>",
    ),
    "glm": Family(
        (
            *("<|endoftext|>", "[gMASK]", "<sop>"),
            *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
        ),
        eos="<|endoftext|>",
        plain=("<think>", "</think>", "<tool_call>", "</tool_call>"),
    ),
    "gpt_oss": Family(
        ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|return|>", "<|call|>"),
        eos="<|return|>",
    ),
    "no_system": Family(("<s>", "</s>"), eos="</s>"),
    "alternating": Family(("<s>", "</s>"), eos="</s>", bos="<s>"),
    "ends_differently": Family(
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), "<|endoftext|>"
    ),
}
MERGES = (("Ċ", "Ċ"), ("Ġ", "4"), ("t", "h"), ("<", "|"), ("|", ">"))
"""As in real vocabularies: tokens that reach across the edges of turns."""


@cache
def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes, a few pairs of them, and the special tokens of a template's family."""
    family = FAMILIES[name]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *("".join(pair) for pair in MERGES)]
    model = models.BPE({piece: number for number, piece in enumerate(pieces)}, list(MERGES))
    plain = Tokenizer(model)
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(list(family.special))
    plain.add_tokens([AddedToken(token, normalized=False) for token in family.plain])
    if family.bos is not None:
        number = plain.token_to_id(family.bos)
        plain.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, number)]
        )
    found = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=family.eos, bos_token=family.bos
    )
    found.name_or_path = name
    parts = sorted(FOLDER.glob(f"{name}.*.jinja"))
    if parts:
        found.chat_template = {part.name.split(".")[1]: part.read_text() for part in parts}
    else:
        found.chat_template = (FOLDER / f"{name}.jinja").read_text()
    return found


class Case(NamedTuple):
    """A conversation with a template.

    Attributes:
        learn: `data.learn`; None: its default.
        options: Of the template.
        rows: What must come of it, one text per row, or nothing if it must be refused.
        refusal: Words of the refusal.
    """

    template: str
    conversation: str
    learn: str | None
    options: dict[str, Any]
    rows: list[str]
    refusal: str | None

    @property
    def messages(self) -> list[dict[str, Any]]:
        return CONVERSATIONS[self.conversation]

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return [TOOL] if self.conversation == "tools" else None

    @property
    def prompt(self) -> str:
        """The text that the model reads before it writes the last answer."""
        return self.rows[-1].rpartition("⟦")[0].replace("⟦", "").replace("⟧", "")

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        return "-".join([self.template, self.conversation, *filter(None, [self.learn]), *options])


def read_cases() -> list[Case]:
    """All cases of all templates."""
    return [case for name in FAMILIES for case in _cases_of(name)]


def _cases_of(name: str) -> list[Case]:
    text = (FOLDER / f"{name}.txt").read_text()
    titles = re.split(r"^=== (.*)\n", text, flags=re.MULTILINE)[1:]
    cases = []
    for title, body in zip(titles[::2], titles[1::2], strict=True):
        options = dict(re.findall(r'(\w+)=("[^"]*"|\w+)', title))
        title = re.sub(r'\w+=("[^"]*"|\w+)', "", title).strip()
        known = next(one for one in sorted(CONVERSATIONS, key=len)[::-1] if title.startswith(one))
        learn = title.removeprefix(known).strip() or None
        body = body.removesuffix("\n")
        refusal = body.removeprefix("refused: ") if body.startswith("refused: ") else None
        rows = [] if refusal else body.split("\n--- and\n")
        values = {key: json.loads(value) for key, value in options.items()}
        cases.append(Case(name, known, learn, values, rows, refusal))
    return cases
