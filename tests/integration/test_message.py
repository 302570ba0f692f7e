"""What travels between driver and hosts as bytes, and what must not."""

import enum
import math

import numpy as np
import pytest
import torch

from hybridrl.batch.batch import Batch
from hybridrl.batch.call_record import CallRecord
from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.group_call import RankReply, ShardInfo, WorkerFailure
from hybridrl.controller.table_expression import ResultTable
from hybridrl.ray_backend.call_messages import deserialize_reply, serialize_reply

PLAIN = [
    None,
    True,
    -3,
    0.1,
    math.inf,
    "words",
    (),
    {},
    {"loss": 0.5, "kl": None, 3: [1, (2.0, "x")]},
    [("nested", {"a": [{"b": ()}]})],
]


class Name(str):
    """A text of a class that the other side might not have."""


class Kind(enum.IntEnum):
    ONE = 1


OTHER = [
    torch.ones(2),
    np.float64(1.0),
    np.arange(2),
    {1, 2},
    b"bytes",
    Name("x"),
    Kind.ONE,
    object(),
    BatchRef(ResultTable(())),
    Batch.from_columns({"x": [1]}),
]


def reply(value):
    return RankReply(CallRecord("actor", 3, "update"), value)


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_replies_become_bytes_and_come_back(value):
    for message in (reply(value), reply([value])):
        sealed = serialize_reply(message, [message.value])
        assert type(sealed) is bytes
        assert deserialize_reply(sealed) == message
    together = serialize_reply([reply(value), reply(1)], [value, 1])
    assert type(together) is bytes
    assert deserialize_reply(together) == [reply(value), reply(1)]


@pytest.mark.parametrize("value", OTHER, ids=lambda value: type(value).__name__)
def test_what_is_not_plain_stays_as_it_is(value):
    for message in (reply(value), reply({"deep": [(value,)]})):
        assert serialize_reply(message, [message.value]) is message
        assert deserialize_reply(message) is message
        first, second = serialize_reply([message, reply(1)], [message.value, 1])
        assert first is message and second == reply(1)
    assert serialize_reply(1, [{Kind.ONE: 1}]) == 1, "keys count too"


def test_a_reply_carries_what_the_driver_knows_of_a_shard():
    info = ShardInfo.of(Batch.from_columns({"prompt_ids": [[1, 2], [3]]}), np.array([4, 2]))
    failure = WorkerFailure("actor", 0, "update", "ValueError: no", "Traceback", 1.0)
    record = CallRecord("actor", 0, "update")
    record.metrics["rows"] = 2.0
    record.phases = {"train": 0.5}
    found = deserialize_reply(
        serialize_reply(RankReply(record, info=info, failure=failure), [None])
    )
    assert found.record == record and found.failure == failure and found.value is None
    assert found.info.rows.tolist() == [4, 2] and found.info.schema.names == ["prompt_ids"]
    assert found.info.tokens["prompt_ids"].tolist() == [2, 1]


def test_bytes_only_are_opened():
    for message in ("text", None, 3, bytearray(b"x")):
        assert deserialize_reply(message) is message
