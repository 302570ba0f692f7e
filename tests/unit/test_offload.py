"""What leaves the device: moments between updates, models when another role wants the memory."""

from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from engine_cases import LEARNING, make_batch, make_engine, parameters
from settings import configured

from hybridrl.algorithms import negative_log_likelihood
from hybridrl.batch.batch import Batch
from hybridrl.checkpoint.engine_state.state_saver import EngineStateSaver
from hybridrl.checkpoint.engine_state.training_state import load_training_state
from hybridrl.checks.check_list import check
from hybridrl.controller import DP, InlineExecutor, Worker, WorkerGroup, transfer
from hybridrl.engine.moment_storage import MomentStorage
from hybridrl.errors import ConfigError
from hybridrl.parallel import fsdp
from hybridrl.parallel.fsdp import list_unit_parameters

MOMENTS = 2
STEPS = 3


@pytest.mark.parametrize("small", [True, False])
def test_moments_that_come_part_by_part_change_nothing(mesh, monkeypatch, small):
    """Here they move from memory to the same memory; what is stepped, and when, is as on a GPU."""
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 1 << 20 if small else 0)
    batch, found, stepped, brought = make_batch(), [], [], []
    bring = MomentStorage._bring

    def count(storage, number):
        for part in storage._parts[number : number + 1]:
            brought.extend(storage._moments(part))
        bring(storage, number)

    monkeypatch.setattr(MomentStorage, "_bring", count)
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
    assert len(brought) == (STEPS - 1) * MOMENTS * trained


def held(optimizer):
    return sum(len(group["params"]) for group in optimizer.param_groups)


def likelier(outputs, columns, segments):
    return negative_log_likelihood(outputs["log_probs"])


def test_every_trained_parameter_is_in_one_part(mesh, monkeypatch):
    monkeypatch.setattr(fsdp, "SMALL_MODEL_BYTES", 0)
    engine = make_engine(mesh)
    engine.model.inner.base_model.layers[0].requires_grad_(False)
    parts = [p for part in list_unit_parameters(engine.model) for p in part]
    assert len(parts) == len(set(parts))
    assert set(parts) == {p for p in engine.model.parameters() if p.requires_grad}


def learn(engine, steps):
    for _ in range(steps):
        engine.update(make_batch(), likelier)
    return parameters(engine)


def moments(engine):
    return [
        engine.optimizer.state[parameter][kind].to_local()
        for parameter in engine.model.parameters()
        for kind in ("exp_avg", "exp_avg_sq")
    ]


def test_moments_rest_in_half_precision_and_compute_in_float32(mesh):
    whole, half = (
        make_engine(mesh, optimizer=replace(LEARNING, moments=dtype))
        for dtype in ("float32", "bfloat16")
    )
    begin = parameters(whole)
    wanted, found = learn(whole, STEPS) - begin, learn(half, STEPS) - begin
    assert {m.dtype for m in moments(half)} == {torch.bfloat16}
    assert float((found - wanted).norm()) < 0.02 * float(wanted.norm())
    for one, other in zip(moments(whole), moments(half), strict=True):
        assert float((other.float() - one).norm()) < 0.02 * float(one.norm())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_moments_of_half_precision_are_saved_and_read_bit_for_bit(mesh, tmp_path, asynchronous):
    settings = replace(LEARNING, moments="bfloat16")
    engine = make_engine(mesh, optimizer=settings)
    learn(engine, 2)
    saver = EngineStateSaver(engine)
    if asynchronous:
        saver.start(tmp_path, {}, {})
        saver.finish(True)
    else:
        saver.save(tmp_path, {}, {})
    again = make_engine(mesh, optimizer=settings)
    load_training_state(again, tmp_path)
    for one, other in zip(moments(engine), moments(again), strict=True):
        assert one.dtype is other.dtype is torch.bfloat16 and torch.equal(one, other)
    assert torch.equal(learn(engine, 2), learn(again, 2))


def test_moments_that_would_not_move_are_refused():
    slow = ["actor.optimizer.moments=bfloat16", "actor.optimizer.betas=[0.9,0.999]"]
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.betas=.*bfloat16 rounds away"):
        check(configured(slow))
    with pytest.raises(ConfigError, match=r"actor\.optimizer\.moments=int4: must be one of"):
        check(configured(["actor.optimizer.moments=int4"]))


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
