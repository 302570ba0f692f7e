"""Files of JSON lines that nobody would write by hand: what comes of them is a batch or a sentence.

`HYBRIDRL_FUZZ_MINUTES=30` goes on for so long, with new examples each time."""

import contextlib
import json
import os
import time

import pytest
from data_rows import with_template
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hybridrl.config.schema import DataConfig
from hybridrl.data.datasets import load_rows
from hybridrl.errors import HybridRLError

MINUTES = float(os.environ.get("HYBRIDRL_FUZZ_MINUTES", 0))
pytestmark = pytest.mark.timeout(0 if MINUTES else 600)
KINDS = ("prompts", "examples", "pairs")
COLUMNS = ("prompt", "answer", "response", "chosen", "rejected", "messages")
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}<eos>{% endfor %}"

text = st.one_of(
    st.text(max_size=20),
    st.text(st.characters(categories=("Cs", "Cc", "Ll")), max_size=5),
    st.sampled_from(["", " ", "1+1=", "<eos>", "<pad>1", "\0", "\ud800", "a" * 200]),
)
numbers = st.one_of(st.integers(), st.floats(), st.integers(-(2**200), 2**200))
values = st.recursive(
    st.one_of(st.none(), st.booleans(), numbers, text),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(text, inner, max_size=3)),
    max_leaves=6,
)
message = st.one_of(
    values,
    st.fixed_dictionaries(
        {"role": st.one_of(st.sampled_from(["user", "assistant", "system", "tool"]), values)},
        optional={"content": st.one_of(text, values), "tool_calls": values, "name": values},
    ),
)
cell = st.one_of(text, text, st.lists(message, max_size=3), values)
right = st.fixed_dictionaries({name: st.sampled_from(["1", "2"]) for name in COLUMNS})
row = st.one_of(
    right,
    st.fixed_dictionaries({}, optional=dict.fromkeys(COLUMNS, cell)),
    st.dictionaries(st.one_of(st.sampled_from(COLUMNS), text), cell, max_size=6),
    st.builds(lambda base, odd: {**base, **odd}, right, st.dictionaries(text, values, max_size=2)),
)
line = st.one_of(
    row.map(lambda found: json.dumps(found).encode()),
    row.map(lambda found: json.dumps(found, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    row.map(lambda found: json.dumps(found).encode()[:-1]),
    st.binary(max_size=40),
    st.sampled_from([b"", b"[", b"{", b"null", b'{"a": 1, "a": 2}', b"[" * 5000]),
)
changed = st.dictionaries(st.sampled_from(COLUMNS), cell, max_size=1)
nearly_right = st.builds(lambda base, odd: json.dumps({**base, **odd}).encode(), right, changed)
files = st.one_of(
    st.lists(line, max_size=4),
    st.lists(nearly_right, min_size=1, max_size=8),
    st.lists(nearly_right, min_size=1, max_size=8),
)
chosen = st.fixed_dictionaries(
    {
        "chat": st.sampled_from([None, True, False]),
        "answer_column": st.sampled_from(["answer", None, "messages.content", "answer.text"]),
        "messages_column": st.sampled_from([None, "messages"]),
        "margin_column": st.sampled_from([None, "answer"]),
        "system_prompt": st.sampled_from([None, "be"]),
        "too_long": st.sampled_from(["error", "drop"]),
    }
)


@pytest.fixture(scope="module")
def tokenizer():
    return with_template(TEMPLATE)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("fuzz") / "rows.jsonl"


def fuzz(file, tokenizer, **how):
    """Tries examples."""

    @given(lines=files, kind=st.sampled_from(KINDS), data=chosen)
    @settings(suppress_health_check=list(HealthCheck), **how)
    def load(lines, kind, data):
        file.write_bytes(b"\n".join(lines))
        config = DataConfig(path=str(file), **data)
        with contextlib.suppress(HybridRLError):
            try:
                found = load_rows(kind, config, tokenizer, held_out=2, seed=0)
                assert len(found.training)
            except HybridRLError as error:
                str(error).encode()  # a console can show it
                raise

    load()


def test_any_file_is_read_or_refused_by_a_sentence(file, tokenizer):
    fuzz(file, tokenizer)
    until = time.monotonic() + 60 * MINUTES
    while time.monotonic() < until:
        fuzz(file, tokenizer, max_examples=1000, derandomize=False)
