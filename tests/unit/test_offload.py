"""What leaves the device: moments between updates, models when another role wants the memory."""

from typing import ClassVar

import pytest
import torch
from engine_cases import LEARNING, make_batch, make_engine, parameters

from hybridrl.algorithms import negative_log_likelihood
from hybridrl.controller import DP, InlineExecutor, Worker, WorkerGroup, transfer
from hybridrl.core.batch import Batch
from hybridrl.parallel import fsdp
from hybridrl.parallel.fsdp import unit_parameters

MOMENTS = 2
STEPS = 3


@pytest.mark.parametrize("small", [True, False])
def test_moments_that_come_part_by_part_change_nothing(mesh, monkeypatch, small):
    """Here they move from memory to the same memory; what is stepped, and when, is as on a GPU."""
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 1 << 20 if small else 0)
    batch, found, stepped = make_batch(), [], []
    for hosts in (False, True):
        engine = make_engine(mesh)
        engine._hosts_moments = hosts
        engine.start_optimizer(LEARNING, updates=1000)
        if hosts:
            engine.optimizer.register_step_pre_hook(lambda o, *_: stepped.append(held(o)))
        for _ in range(STEPS):
            engine.update(batch, likelier)
        found.append((parameters(engine), engine.optimizer.param_groups[0]["lr"]))
    assert torch.equal(found[0][0], found[1][0]) and found[0][1] == found[1][1]
    trained = sum(1 for _ in engine.model.parameters())
    assert sum(stepped) == STEPS * trained, "every parameter once in a step"
    assert len(stepped) == STEPS * (1 if small else 3), "a unit at a time"
    # The first step makes them.
    assert engine._hosted.brought == (STEPS - 1) * MOMENTS * trained


def held(optimizer):
    return sum(len(group["params"]) for group in optimizer.param_groups)


def likelier(outputs, columns, segments):
    return negative_log_likelihood(outputs["log_probs"])


def test_every_trained_parameter_is_in_one_part(mesh, monkeypatch):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    engine = make_engine(mesh)
    engine.model.inner.base_model.layers[0].requires_grad_(False)
    parts = [p for part in unit_parameters(engine.model) for p in part]
    assert len(parts) == len(set(parts))
    assert set(parts) == {p for p in engine.model.parameters() if p.requires_grad}


class Role(Worker):
    """Notes when it gives the memory back."""

    notes: ClassVar[list[str]] = []

    def __init__(self, context, takes):
        super().__init__(context)
        self._takes = takes

    @property
    def takes_memory(self):
        return self._takes

    def make_room(self):
        self.notes.append(f"{self.context.role} makes room")

    @transfer(DP)
    def work(self, batch: Batch) -> Batch:
        self.notes.append(self.context.role)
        return batch


def test_a_role_makes_room_only_when_another_wants_the_memory():
    Role.notes.clear()
    batch = Batch.from_columns({"x": torch.arange(3)})
    with InlineExecutor("cpu") as executor:
        takes = {"actor": True, "functions": False, "reference": True}
        groups = {role: WorkerGroup(executor, role, Role, [0], takes=takes[role]) for role in takes}
        Role.notes.clear()
        order = ["actor", "actor", "functions", "actor", "reference", "functions", "actor"]
        for role in order:
            groups[role].work(executor.put(batch)).collect()
    assert Role.notes == [
        "reference makes room",  # it was built last
        *("actor", "actor", "functions", "actor"),
        "actor makes room",
        *("reference", "functions"),
        "reference makes room",
        "actor",
    ]
