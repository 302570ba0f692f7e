"""A sender of rough weights that begins anew sends what depends on nothing that it sent before."""

from types import SimpleNamespace

import torch

from hybridrl.weights.encoded_parcels import ParcelEncoder
from hybridrl.weights.encoded_reshard import SyncCost
from hybridrl.weights.parcel_transfer import ParcelKey
from hybridrl.weights.sync_choice import SyncMethodChoice
from hybridrl.weights.weight_channel import WeightChannel
from hybridrl.weights.weight_message import SYNC_METHODS

CPU = torch.device("cpu")


class OneParcel:
    """Stands in for a `Sender`."""

    rank = 0

    def pack(self, read, device):
        yield ParcelKey(0, 0), read("weight").view(torch.uint8)


def channel():
    made = WeightChannel.__new__(WeightChannel)
    made._choice, made._by_parcels = SyncMethodChoice("int4_delta", refresh=3), True
    made._sync = SimpleNamespace(coded=None)
    made._encoder = ParcelEncoder(OneParcel(), torch.bfloat16, CPU)
    return made


def sent(by, updates):
    """The methods and bytes of so many syncs."""
    found = []
    for seed in updates:
        values = torch.randn(1000, generator=torch.Generator().manual_seed(seed)).bfloat16()
        read, method = {"weight": values}.__getitem__, by._choice.method()
        ((_, message),) = by._encoder.encode(read, method, seed, SyncCost())
        found.append((SYNC_METHODS[message.header.method], message.data.tolist()))
    return found


def test_one_that_restarts_sends_what_a_new_one_would():
    old, new = channel(), channel()
    assert [method for method, _ in sent(old, (1, 2))] == ["full", "int4_delta"]
    old.restart()
    again = sent(old, (3, 4, 5))
    assert again == sent(new, (3, 4, 5))
    assert [method for method, _ in again] == ["full", "int4_delta", "full"]
