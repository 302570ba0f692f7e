"""Messages of weights: both ends hold the same bits by every method, and damage is found."""

import pytest
import torch

from hybridrl.weights.weight_message import (
    SYNC_METHODS,
    DamagedMessageError,
    WeightMessage,
    WeightRecord,
    compute_checksum,
)

SIZE = 3001


def weights(dtype, seed=0):
    return (torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * 0.02).to(dtype)


def updated(values, seed, most=1e-4):
    step = torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) * most
    return (values.float() + step).to(values.dtype)


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", SYNC_METHODS)
def test_receivers_hold_the_senders_record_at_every_version(method, dtype):
    sender, receiver, values = WeightRecord(), WeightRecord(), weights(dtype)
    for version in range(1, 5):
        message = sender.encode(values, method, version)
        found = receiver.decode(message, SIZE, dtype)
        assert same_bits(found, sender.values) and same_bits(receiver.values, sender.values)
        assert sender.version == receiver.version == version
        if method in ("full", "delta"):
            assert same_bits(found, values)
        first = version == 1 and method != "int8"
        assert SYNC_METHODS[message.header.method] == ("full" if first else method)
        assert (message.changed is None) == (first or method in ("full", "int8"))
        values = updated(values, version)
    assert receiver.nbytes == values.nbytes
    parts = {"full": 1.0, "int8": 1.03 / dtype.itemsize, "int4_delta": 0.51 / dtype.itemsize}
    if method in parts:
        assert len(message.data) / values.nbytes == pytest.approx(parts[method], rel=0.01)


def test_errors_of_differences_do_not_add_up_and_vanish():
    """The step from one version to the next is rounded to a fifteenth of the largest, but what was
    lost is part of the next difference."""
    sender, values = WeightRecord(), weights(torch.float32)
    sender.encode(values, "int4_delta", 1)
    errors = []
    for version in range(2, 22):
        values = updated(values, version)
        sender.encode(values, "int4_delta", version)
        errors.append(float((sender.values - values).norm()))
    assert max(errors[10:]) < 1.5 * max(errors[:10])
    for version in range(22, 32):
        sender.encode(values, "int4_delta", version)
    assert same_bits(sender.values, values) or (sender.values - values).norm() < 1e-6 * errors[0]


@pytest.mark.parametrize("method", SYNC_METHODS)
def test_a_damaged_message_changes_nothing_and_whole_values_mend_it(method):
    sender, receiver = WeightRecord(), WeightRecord()
    old = weights(torch.bfloat16)
    receiver.decode(sender.encode(old, method, 1), SIZE, torch.bfloat16)
    held = receiver.values.clone()
    header, data, _ = sender.encode(updated(old, 1, 1e-3), method, 2)
    for at in (3, len(data) // 3, len(data) - 2):
        wrong = data.clone()
        wrong[at] ^= 1
        with pytest.raises(DamagedMessageError):
            receiver.decode(WeightMessage(header, wrong), SIZE, torch.bfloat16)
    with pytest.raises(DamagedMessageError):
        receiver.decode(WeightMessage(header, data[:-1]), SIZE, torch.bfloat16)
    with pytest.raises(DamagedMessageError, match="no method 99"):
        receiver.decode(WeightMessage(header._replace(method=99), data), SIZE, torch.bfloat16)
    assert same_bits(receiver.values, held) and receiver.version == 1
    receiver.decode(sender.whole(), SIZE, torch.bfloat16)
    assert same_bits(receiver.values, sender.values) and receiver.version == 2


@pytest.mark.parametrize("method", ["delta", "int4_delta"])
def test_differences_to_what_is_not_held_are_refused(method):
    sender, values = WeightRecord(), weights(torch.bfloat16)
    first = sender.encode(values, method, 1)
    second = sender.encode(updated(values, 1), method, 2)
    third = sender.encode(updated(values, 2), method, 3)
    receiver = WeightRecord()
    with pytest.raises(DamagedMessageError, match="to version 1, where 0 is held"):
        receiver.decode(second, SIZE, torch.bfloat16)
    receiver.decode(first, SIZE, torch.bfloat16)
    with pytest.raises(DamagedMessageError, match="to version 2, where 1 is held"):
        receiver.decode(third, SIZE, torch.bfloat16)
    sender.forget()
    assert sender.nbytes == 0
    assert SYNC_METHODS[sender.encode(values, method, 4).header.method] == "full"


@pytest.mark.parametrize("method", ["int8", "int4_delta"])
def test_what_is_not_finite_travels_exactly(method):
    sender, receiver = WeightRecord(), WeightRecord()
    values = weights(torch.bfloat16)
    receiver.decode(sender.encode(values, method, 1), SIZE, torch.bfloat16)
    broken = values.clone()
    broken[7] = torch.nan
    for version, now in enumerate((broken, values, values), 2):
        message = sender.encode(now, method, version)
        assert same_bits(receiver.decode(message, SIZE, torch.bfloat16), sender.values)
        if now is broken:
            assert SYNC_METHODS[message.header.method] == "full" and same_bits(
                sender.values, broken
            )
    assert (receiver.values - values).abs().max() < 1e-3


def test_checksums_know_order_ends_and_every_bit():
    values = weights(torch.bfloat16)[:9]
    found = {
        compute_checksum(values),
        compute_checksum(values.flip(0)),
        compute_checksum(values[:8]),
        compute_checksum(values[:0]),
    }
    for bit in range(16):
        other = values.clone()
        other.view(torch.int16)[8] ^= -(2**15) if bit == 15 else 1 << bit
        found.add(compute_checksum(other))
    assert len(found) == 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_bit_that_is_turned_over_in_two_places_is_seen(dtype):
    values = weights(dtype)
    for place in range(1, 9):
        other = values.clone()
        other[[place, 40 + place]] *= -1  # the highest bit, also of wider words
        assert compute_checksum(other) != compute_checksum(values)
