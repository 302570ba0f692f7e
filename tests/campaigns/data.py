"""Files and rows that cannot be learned from, and odd ones that can."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from campaigns.campaign import WORKS, Case
from campaigns.models import JOB, base, temporary
from transformers import AutoTokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}({{ m.content }})<eos>{% endfor %}"
    "{% if add_generation_prompt %}a({% endif %}"
)
Write = Callable[[Path], object]
Make = Callable[[Path], list[str]]


@cache
def chat_tokenizer() -> str:
    """The tokenizer of the base model, with a chat template."""
    folder = temporary()
    made = AutoTokenizer.from_pretrained(base())
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return str(folder)


def job(write: Write, path: str, *overrides: str) -> Make:
    """A job on what is written at a path of the folder."""

    def make(folder: Path) -> list[str]:
        write(folder)
        chosen = [override.replace("@", f"{folder}/") for override in overrides]
        places = ["data=jsonl", f"data.path={folder / path}", f"run.root={folder / 'runs'}"]
        return [*JOB, *places, f"model.path={base()}", *chosen]

    return make


def named(path: str, *overrides: str) -> Make:
    """A job on a path that is written by nobody."""
    return lambda folder: [
        *JOB,
        "data=jsonl",
        f"data.path={path}",
        f"model.path={base()}",
        *overrides,
    ]


def lines(*rows: Any, to: str = "rows.jsonl", overrides: tuple[str, ...] = ()) -> Make:
    """A job on these rows: texts and bytes as they are, other values as JSON."""
    return job(lambda folder: put(folder / to, *rows), to, *overrides)


def put(file: Path, *rows: Any) -> None:
    """Writes rows to a file of JSON lines."""
    as_text = [row if isinstance(row, str | bytes) else json.dumps(row) for row in rows]
    content = b"\n".join(row if isinstance(row, bytes) else row.encode() for row in as_text)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(gzip.compress(content) if file.suffix == ".gz" else content)


def with_good(*rows: Any, overrides: tuple[str, ...] = ()) -> Make:
    """As `lines`, after good rows."""
    return lines(*GOOD, *rows, overrides=overrides)


def parquet(columns: dict[str, Any], *overrides: str) -> Make:
    """A job on a Parquet file."""
    return job(
        lambda f: pq.write_table(pa.table(columns), f / "rows.parquet"), "rows.parquet", *overrides
    )


def chats(*talks: list[Any], overrides: tuple[str, ...] = ()) -> Make:
    """A job on chats, with a tokenizer that has a template for them."""
    rows = [{"prompt": talk, "answer": "1"} for talk in talks]
    here = ("data.max_prompt_tokens=60", "rollout.max_tokens=4", *overrides)

    def make(folder: Path) -> list[str]:
        return [*lines(*rows, overrides=here)(folder), f"model.tokenizer={chat_tokenizer()}"]

    return make


def responses(*rows: Any, overrides: tuple[str, ...] = ()) -> Make:
    """A job of supervised fine-tuning."""
    return lines(*rows, overrides=("algorithm=sft", *overrides))


def preferences(*rows: Any, overrides: tuple[str, ...] = ()) -> Make:
    """A job that learns from pairs."""
    return lines(*rows, overrides=("algorithm=dpo", *overrides))


def task(*overrides: str) -> Make:
    """A job of a task, without a file."""
    return lambda folder: ["data=arithmetic", *JOB, "warmup.steps=0", *overrides]


def own_task(code: str) -> Make:
    """A job of a task of the user's."""

    def make(folder: Path) -> list[str]:
        package = f"campaign_tasks_{folder.name.replace('-', '_')}"
        (folder / package).mkdir()
        (folder / package / "mine.py").write_text(code)
        sys.path.append(str(folder))
        return task(f"data.task={package}.mine")(folder)

    return make


def folder_of(*names: str) -> Write:
    """Good rows in files of these names, each with prompts of its own."""

    def write(folder: Path) -> None:
        for number, name in enumerate(names):
            rows = [{"prompt": f"{number}*{n}=", "answer": str(number * n)} for n in range(8)]
            put(folder / "rows" / name, *rows)

    return write


def user(content: Any, role: Any = "user") -> dict[str, Any]:
    """A message."""
    return {"role": role, "content": content}


def example(number: int) -> dict[str, str]:
    """A row with everything that a trainer may want."""
    right = str(number + 1)
    return {
        "prompt": f"{number}+1=",
        "answer": right,
        "response": right,
        "chosen": right,
        "rejected": "0",
    }


GOOD = [example(number) for number in range(8)]
NO_ANSWERS = ("data.answer_column=null", "reward.function=length", "reward.options.length.limit=4")
SHORT = ("data.max_prompt_tokens=60",)
TASK = """
CHARACTERS = globals().get("CHARACTERS", "0123456789+=")
def problems(count_held_out, seed):
    return {}
"""
NESTED = [
    {"prompt": f"{n}+2=", "reward_model": {"ground_truth": str(n + 2), "style": "rule"}}
    for n in range(8)
]
VERL = ("data.answer_column=reward_model.ground_truth",)
DEEP = '{"prompt": "1+1=", "answer": "2", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}"

CASES = [
    Case("good rows", lines(*GOOD), WORKS, runs=True, timeout_s=90),
    # Files
    Case("no such file", named("/nowhere/rows.jsonl"), "data.path.*no such file"),
    Case("no such folder", named("/nowhere/"), "data.path.*no such file"),
    Case("a glob of nothing", named("/nowhere/*.jsonl"), "data.path.*no such file"),
    Case("a name of the hub", named("nobody/nothing"), "data.path.*(no file here|hub)"),
    Case("a name without end", named("a" * 5000), "data.path.*255 bytes"),
    Case("a path without end", named("/tmp/" + "a/" * 5000), "data.path.*must be"),
    Case("a name that can be none", named("two words"), "data.path.*no such file"),
    Case("an empty file", lines(), "holds no rows"),
    Case("only empty lines", lines("", "  ", ""), "holds no rows"),
    Case("an empty folder", job(lambda f: (f / "rows").mkdir(), "rows"), "holds no file that ends"),
    Case(
        "a table with commas",
        lines("prompt,answer", "1+1=,2", to="rows.csv"),
        "by its name no file of rows",
    ),
    Case("plain text", lines("1+1=2", to="rows.txt"), "by its name no file of rows"),
    Case("a table in a JSONL file", lines("prompt,answer", "1+1=,2"), "line 1, is no valid JSON"),
    Case("gzip", lines(*GOOD, to="rows.jsonl.gz"), WORKS),
    Case(
        "gzip that is none",
        job(lambda f: (f / "r.jsonl.gz").write_text("no"), "r.jsonl.gz"),
        "cannot be read",
    ),
    Case(
        "gzip cut short",
        job(
            lambda f: (f / "r.jsonl.gz").write_bytes(gzip.compress(b"x" * 9000)[:30]), "r.jsonl.gz"
        ),
        "cannot be read",
    ),
    Case("Parquet that is none", lines("no", to="rows.parquet"), "no readable Parquet"),
    Case("Arrow that is none", lines("no", to="rows.arrow"), "no readable Arrow"),
    Case("Parquet of no rows", parquet({"prompt": pa.array([], pa.string())}), "holds no rows"),
    Case(
        "files of two formats",
        job(
            lambda f: (
                folder_of("a.jsonl")(f),
                pq.write_table(pa.table({"prompt": ["1"]}), f / "rows" / "b.parquet"),
            ),
            "rows",
        ),
        "different formats",
    ),
    Case(
        "a file without rights",
        job(lambda f: (f / "rows.jsonl").mkdir(), "rows.jsonl"),
        "holds no file",
    ),
    Case(
        "the byte order mark",
        lines(b"\xef\xbb\xbf" + json.dumps(GOOD[0]).encode(), *GOOD[1:]),
        WORKS,
    ),
    Case("UTF-16", lines(json.dumps(GOOD[0]).encode("utf-16")), "no text in UTF-8"),
    Case(
        "Latin 1",
        with_good('{"prompt": "1", "answer": "é"}'.encode("latin-1")),
        "no text in UTF-8.*Save the file as UTF-8",
    ),
    Case("bytes of nobody", lines(bytes(range(128, 256))), "line 1, is no text in UTF-8"),
    # Lines
    Case(
        "one large array",
        lines(*json.dumps(GOOD, indent=1).splitlines()),
        "one object per line instead",
    ),
    Case(
        "one large object",
        lines(*json.dumps({"data": GOOD}, indent=1).splitlines()),
        "one object per line",
    ),
    Case("a line cut short", with_good('{"prompt": "1+1='), "line 9, is no valid JSON"),
    Case("an array", with_good("[1, 2]"), "line 9, holds a JSON array"),
    Case("a number", lines("7"), "line 1, holds a JSON number"),
    Case("a fraction", lines("7.5"), "line 1, holds a JSON number"),
    Case("null", lines("null"), "line 1, holds a JSON null"),
    Case("Python's quotes", lines("{'prompt': '1', 'answer': '2'}"), "line 1, is no valid JSON"),
    Case(
        "a key twice",
        with_good('{"prompt": "1+1=", "answer": "2", "answer": "3"}'),
        "line 9.*'answer' stands there twice",
    ),
    Case(
        "a key twice inside",
        with_good('{"prompt": "1", "answer": "2", "meta": {"a": 1, "a": 2}}'),
        "'a' stands there twice",
    ),
    Case("nested without end", lines(DEEP), "line 1, is no valid JSON|cannot be kept"),
    Case(
        "a number without end",
        with_good('{"prompt": "1+1=", "answer": ' + "9" * 5000 + "}"),
        "line 9, is no valid JSON",
    ),
    # Columns
    Case(
        "no prompt",
        lines({"question": "1+1=", "answer": "2"}),
        "no column `prompt` .`data.prompt_column",
    ),
    Case("a misspelt column", lines({"promt": "1+1=", "answer": "2"}), "Did you mean `promt`"),
    Case("no answer", lines({"prompt": "1+1="}), "no column `answer` .`data.answer_column"),
    Case("an answer in some rows", with_good({"prompt": "1+1="}), "line 9, has no column `answer`"),
    Case(
        "no answers wanted",
        lines(*({"prompt": f"{n}+1="} for n in range(8)), overrides=NO_ANSWERS),
        WORKS,
    ),
    Case("verl's rows", lines(*NESTED, overrides=VERL), WORKS, runs=True, timeout_s=90),
    Case(
        "verl's Parquet",
        parquet(
            {
                "prompt": [r["prompt"] for r in NESTED],
                "reward_model": [r["reward_model"] for r in NESTED],
            },
            *VERL,
        ),
        WORKS,
    ),
    Case(
        "verl's rows, misspelt",
        lines(*NESTED, overrides=("data.answer_column=reward_model.truth",)),
        "no column `reward_model.truth`",
    ),
    Case(
        "dots that lead through text",
        lines(*GOOD, overrides=("data.answer_column=answer.text",)),
        "no column `answer.text`",
    ),
    Case(
        "a column twice",
        job(
            lambda f: pq.write_table(
                pa.table([pa.array(["1"])] * 2, ["prompt", "prompt"]), f / "rows.parquet"
            ),
            "rows.parquet",
        ),
        "several columns of the name `prompt`",
    ),
    Case(
        "an unused column of two types",
        with_good({**GOOD[0], "level": 1}, {**GOOD[1], "level": "hard"}),
        WORKS,
    ),
    Case("an unused number too large", with_good({**GOOD[0], "id": 2**70}), WORKS),
    Case(
        "an unused surrogate",
        with_good('{"prompt": "1+1=", "answer": "2", "note": "\\ud800"}'),
        WORKS,
    ),
    Case(
        "a surrogate as a key", with_good('{"prompt": "1+1=", "answer": "2", "\\ud800": 1}'), WORKS
    ),
    Case(
        "an empty object beside", with_good({**GOOD[0], "meta": {}}), WORKS, runs=True, timeout_s=90
    ),
    Case("columns of the library", with_good({**GOOD[0], "scores": 3}), WORKS),
    # Prompts
    Case("an empty prompt", with_good({"prompt": "", "answer": "2"}), "Row 9.*not empty"),
    Case("a prompt that is null", with_good({"prompt": None, "answer": "2"}), "Row 9 .* has None"),
    Case("a prompt that is a number", lines({"prompt": 7, "answer": "2"}), "Row 1 .* has 7"),
    Case(
        "prompts of two types",
        with_good({"prompt": 7, "answer": "2"}),
        "Row 9 .* has 7 in the column `prompt`",
    ),
    Case(
        "a surrogate in a prompt",
        with_good('{"prompt": "1\\ud800", "answer": "2"}'),
        "line 9.*half of a surrogate",
    ),
    Case(
        "a surrogate in the first prompt",
        lines('{"prompt": "1\\ud800", "answer": "2"}'),
        "line 1.*half of a surrogate",
    ),
    Case("a NUL in a prompt", with_good({"prompt": "1\0", "answer": "2"}), "Row 9.*NUL"),
    Case(
        "a prompt that is too long",
        with_good({"prompt": "1" * 600, "answer": "2"}, overrides=SHORT),
        "Row 9 .*600 tokens",
    ),
    Case(
        "all prompts too long",
        lines({"prompt": "1" * 600, "answer": "2"}, overrides=(*SHORT, "data.too_long=drop")),
        "dropped all rows",
    ),
    Case(
        "prompts longer than the model",
        lines({"prompt": "1" * 62, "answer": "2"}),
        "has 66 tokens .*the model takes 64",
    ),
    Case("a control token in a prompt", with_good({"prompt": "1<eos>", "answer": "2"}), WORKS),
    Case("the same prompt twice", with_good(GOOD[0]), WORKS),
    Case("one row", lines(GOOD[0]), WORKS),
    # Answers
    Case(
        "an empty answer",
        with_good({"prompt": "1+1=", "answer": ""}),
        "Row 9 .* has '' in .*right answer",
    ),
    Case("a blank answer", with_good({"prompt": "1+1=", "answer": " \n"}), "Row 9 .*right answer"),
    Case(
        "an answer that is null",
        with_good({"prompt": "1+1=", "answer": None}),
        "Row 9 .* has None.*right answer",
    ),
    Case(
        "an answer that is NaN",
        with_good('{"prompt": "1+1=", "answer": NaN}'),
        "line 9, has nan in the column `answer`",
    ),
    Case(
        "an answer without end",
        with_good('{"prompt": "1+1=", "answer": Infinity}'),
        "line 9, has inf",
    ),
    Case(
        "answers that are numbers",
        lines({"prompt": "1/2=", "answer": 0.5}, {"prompt": "1*1=", "answer": 1}),
        WORKS,
    ),
    Case("answers of two types", with_good({"prompt": "1+1=", "answer": 2}), WORKS),
    Case(
        "answers that are NaN in Parquet",
        parquet({"prompt": ["1", "2"], "answer": [1.0, float("nan")]}),
        "Row 2 .* has nan",
    ),
    Case(
        "answers of bytes in Parquet",
        parquet({"prompt": ["1"], "answer": [b"1"]}),
        "Row 1 .* has b'1'",
    ),
    Case("a NUL in an answer", with_good({"prompt": "1+1=", "answer": "2\0"}), "Row 9.*NUL"),
    Case(
        "an answer of text for numeric",
        with_good({"prompt": "1+1=", "answer": "two"}, overrides=("reward.function=numeric",)),
        "'two' holds no number",
    ),
    # Chats
    Case("chats", chats([user("1+1")], [user("2+2")]), WORKS, runs=True, timeout_s=90),
    Case(
        "chats without a template",
        lines({"prompt": [user("1+1")], "answer": "2"}),
        "no chat template",
    ),
    Case(
        "chats among texts",
        with_good({"prompt": [user("1+1")], "answer": "2"}),
        "line 9, .* here a JSON array, there a JSON string. Give the column one type",
    ),
    Case(
        "no column of prompts",
        lines(*GOOD, overrides=("data.prompt_column=null",)),
        "is null, which only preference pairs allow. Set it to the column of the prompts\\.$",
    ),
    Case(
        "chats that are not allowed",
        chats([user("1")], overrides=("data.chat=false",)),
        "`data.chat` is false",
    ),
    Case("an empty chat", chats([user("1")], []), "Row 2 .* has \\[\\]"),
    Case("a chat of strings", chats(["1+1"]), "no object with `role` and"),
    Case("a message without a role", chats([{"content": "1"}]), "no object with `role` and"),
    Case("a role that is null", chats([user("1", None)]), "without a role"),
    Case("a role of two kinds", chats([user("1", "")]), "without a role"),
    Case("a role with a capital", chats([user("1", "User")]), "role 'User'; write `user`"),
    Case("a message without content", chats([{"role": "user"}]), "no object with `role` and"),
    Case("content that is null", chats([user("1"), user(None)]), "whose content is no text: None"),
    Case("content that is empty", chats([user("")]), "last message, of the role `user`, is empty"),
    Case("content in parts of text", chats([user([{"type": "text", "text": "1+1"}])]), WORKS),
    Case(
        "content with a picture",
        chats([user([{"type": "image", "text": None}])]),
        "whose content is no text",
    ),
    Case("content that is a number", chats([user(7)]), "whose content is no text: 7"),
    Case(
        "the assistant's turn last",
        chats([user("1"), user("2", "assistant")]),
        "ends with the assistant",
    ),
    Case("a control token in a chat", chats([user("1<eos>2")]), "`<eos>` in the text of a message"),
    Case(
        "a control token in a wrapped prompt",
        chats("1<eos>2", overrides=("data.chat=true",)),
        "`<eos>` in the text",
    ),  # type: ignore[arg-type]
    Case("a NUL in a chat", chats([user("1\0")]), "Row 1.*NUL"),
    Case(
        "a system prompt for strings",
        lines(*GOOD, overrides=("data.system_prompt=be",)),
        "data.system_prompt",
    ),
    # Splits and evaluations
    Case("train and test", job(folder_of("train.jsonl", "test.jsonl"), "rows"), WORKS),
    Case(
        "validation and test",
        job(folder_of("validation.jsonl", "test.jsonl"), "rows"),
        "several splits .validation, test.",
    ),
    Case(
        "a split that is not there",
        job(folder_of("train.jsonl"), "rows", "data.split=dev"),
        "`data.split` is `dev`, but no file",
    ),
    Case(
        "a split of a file",
        lines(*GOOD, overrides=("data.split=train",)),
        "split can be chosen from a folder",
    ),
    Case(
        "files whose columns do not fit",
        job(
            lambda f: (
                put(f / "rows" / "a.jsonl", *GOOD),
                put(f / "rows" / "b.jsonl", {"prompt": "1"}),
            ),
            "rows",
        ),
        "line 1, has no column `answer`",
    ),
    Case(
        "evaluated on what is learned",
        lines(*GOOD, overrides=("data.eval_path=@rows.jsonl",)),
        "data.eval_path.* is data.path",
    ),
    Case(
        "an evaluation of nothing",
        lines(*GOOD, overrides=("data.eval_path=/nowhere.jsonl",)),
        "/nowhere.jsonl.*no such file",
    ),
    Case(
        "a split of no evaluation",
        lines(*GOOD, overrides=("data.eval_split=test",)),
        "needs data.eval_path",
    ),
    Case(
        "an evaluation beside a task",
        lambda f: [
            "data=arithmetic",
            "executor=inline",
            "rollout=transformers",
            "data.eval_path=x",
        ],
        "data.eval_path=x is for data of files",
    ),
    Case(
        "accuracy by no column",
        lines(*GOOD, overrides=("eval.by_column=level",)),
        "eval.by_column is `level`",
    ),
    # Tasks
    Case("no such task", task("data.task=arithmetics"), "no built-in task.*mean `arithmetic`"),
    Case("no such module", task("data.task=absent.task"), "importing that module failed"),
    Case("a module that is no task", task("data.task=os.path"), "has no `CHARACTERS`"),
    Case("a task that is no Python", own_task("def ("), "importing that module failed"),
    Case("a task that raises", own_task("1 / 0"), "importing that module failed"),
    Case("a task of strange problems", own_task(TASK.format("[1], [2]")), "problems"),
    Case(
        "a task of one part", own_task(TASK.format("[{'prompt': '1', 'answer': '2'}]")), "problems"
    ),
    Case("a task without answers", own_task(TASK.format("[{'prompt': '1'}], []")), "answer"),
    Case("a task that fails", own_task(TASK.format("1 / 0")), "problems"),
    Case(
        "characters that are none",
        own_task("CHARACTERS = 5\n" + TASK.format("[], []")),
        "CHARACTERS",
    ),
    Case("characters twice", own_task("CHARACTERS = '11'\n" + TASK.format("[], []")), "repeated"),
    # Other kinds of rows
    Case("examples", responses(*GOOD), WORKS),
    Case("no response", responses({"prompt": "1"}), "no column `response`"),
    Case(
        "a response that is null",
        responses(*GOOD, {**GOOD[0], "response": None}),
        "Row 9 .* has None",
    ),
    Case(
        "no response says anything",
        responses(*({**row, "response": " "} for row in GOOD)),
        "All responses of the data, in the column `response`.*are empty",
    ),
    Case("a NUL in a response", responses(*GOOD, {**GOOD[0], "response": "\0"}), "Row 9.*NUL"),
    Case(
        "a conversation without answers",
        responses(
            {"talk": [user("1")]},
            overrides=("data.messages_column=talk", f"model.tokenizer={chat_tokenizer()}"),
        ),
        "no message of the role `assistant`",
    ),
    Case(
        "no column of prompts to answer",
        responses(*GOOD, overrides=("data.prompt_column=null",)),
        "or `data.messages_column` to that of the conversations to learn",
    ),
    Case("pairs", preferences(*GOOD), WORKS),
    Case(
        "pairs of equal answers",
        preferences({"prompt": "1", "chosen": "2", "rejected": "2"}),
        "No pair is left",
    ),
    Case("no rejected answer", preferences({"prompt": "1", "chosen": "2"}), "no column `rejected`"),
    Case(
        "a chosen answer that is null",
        preferences({"prompt": "1", "chosen": None, "rejected": "2"}),
        "Row 1 .* has None",
    ),
    Case(
        "a margin that is NaN",
        preferences(
            '{"prompt": "1", "chosen": "2", "rejected": "3", "margin": NaN}',
            overrides=("data.margin_column=margin",),
        ),
        "Row 1 .* has nan.*finite number",
    ),
]
