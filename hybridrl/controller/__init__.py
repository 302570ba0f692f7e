"""The single controller: groups of workers, called like objects; handles instead of data."""

from hybridrl.controller.batch_ref import BatchRef
from hybridrl.controller.executor import Executor, InlineExecutor
from hybridrl.controller.group_call import any_column
from hybridrl.controller.transfer_protocol import (
    DP,
    FIRST_RANK,
    ONE_TO_ALL,
    TASKS,
    THREE_D,
    THREE_D_ALL_MICRO_DP,
    UPDATE,
    UPDATE_PAIRS,
    UPDATE_TASKS,
    PartialTable,
    TransferProtocol,
    transfer,
)
from hybridrl.controller.worker import Worker, WorkerContext
from hybridrl.controller.worker_group import Handle, WorkerGroup

__all__ = [
    "DP",
    "FIRST_RANK",
    "ONE_TO_ALL",
    "TASKS",
    "THREE_D",
    "THREE_D_ALL_MICRO_DP",
    "UPDATE",
    "UPDATE_PAIRS",
    "UPDATE_TASKS",
    "BatchRef",
    "Executor",
    "Handle",
    "InlineExecutor",
    "PartialTable",
    "TransferProtocol",
    "Worker",
    "WorkerContext",
    "WorkerGroup",
    "any_column",
    "transfer",
]
