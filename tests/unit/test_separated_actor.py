"""Which parcels of weights a generator is given: differences where it has what they differ from."""

import pytest

from hybridrl.placement import disaggregated_actor
from hybridrl.placement.disaggregated_actor import DisaggregatedActor


@pytest.fixture(autouse=True)
def no_samples(monkeypatch):
    stream = "hybridrl.placement.disaggregated_actor.BatchRef.of_stream"
    monkeypatch.setattr(stream, lambda parts: parts)


class Group:
    """Stands in for a worker group: notes what it is called with."""

    def __init__(self):
        self.calls, self.devices = [], [0]

    def get(self):
        return self

    def __getattr__(self, name):
        if name.startswith("_"):
            raise AttributeError(name)

        def call(*arguments):
            self.calls.append((name, *arguments))
            if name.startswith("pack_"):
                return f"{name}:{sum(made == 'pack_weights' for made, *_ in self.calls)}"
            return self

        return call

    def loaded(self):
        """What came by `load_weights` and `complete_weights` since the last time."""
        found = [call[1] for call in self.calls if call[0] in ("load_weights", "complete_weights")]
        self.calls.clear()
        return found


def actor(staleness=0, weight_sync="delta"):
    trainer, generator = Group(), Group()
    options = {"staleness": staleness, "in_flight": False, "store": True}
    return DisaggregatedActor(trainer, generator, weight_sync=weight_sync, **options), generator


def test_each_version_follows_the_one_before_and_whole_weights_wait_beside_it():
    policy, generator = actor()
    found = []
    for _ in range(3):
        policy.update_actor("batch")
        policy.publish()  # for an evaluation
        policy.publish()
        policy.generate_sequences("batch", None)
        found += generator.loaded()
    assert found == [
        f"{name}:{number}"
        for number in (1, 2, 3)
        for name in ("pack_weights", "pack_whole_weights")
    ]


def test_who_skips_a_version_gets_whole_weights():
    policy, generator = actor(staleness=1)
    policy.publish()
    for _ in range(2):  # the first waits in line, the second comes behind it
        policy.update_actor("batch")
        policy.generate_sequences("batch", None)
    assert generator.loaded() == ["pack_weights:1", "pack_whole_weights:1"]
    policy.update_actor("batch")
    policy.publish()  # at once, before the second was loaded
    assert generator.loaded() == ["pack_whole_weights:3"] * 2
    policy.update_actor("batch")
    policy.publish()
    assert generator.loaded() == ["pack_weights:4", "pack_whole_weights:4"]


@pytest.mark.parametrize(("weight_sync", "again"), [("delta", False), ("int4_delta", True)])
def test_a_generator_whose_weights_come_of_earlier_ones_gets_them_anew_at_a_checkpoint(
    weight_sync, again
):
    """A run that goes on from there knows nothing of the earlier ones."""
    policy, generator = actor(weight_sync=weight_sync)
    policy.start_saving("folder")  # before any update there are none
    policy.publish()
    policy.update_actor("batch")
    policy.publish()
    assert generator.loaded() == ["pack_weights:1", "pack_whole_weights:1"]
    policy.start_saving("folder")
    policy.publish()
    assert generator.loaded() == (["pack_weights:2", "pack_whole_weights:2"] if again else [])
    calls = [name for name, *_ in policy._trainer.calls]
    assert calls.count("forget_sent_weights") == again
    if again:
        assert calls.index("forget_sent_weights") < len(calls) - calls[::-1].index("pack_weights")


def test_without_differences_weights_are_packed_once():
    policy, generator = actor(weight_sync="full")
    policy.update_actor("batch")
    policy.publish()
    assert generator.loaded() == ["pack_weights:1"]


@pytest.mark.parametrize(
    ("full", "delta", "kept"), [(1.0, 3.0, "plain"), (3.0, 1.0, "delta"), (1.0, 1.0, "plain")]
)
def test_the_first_parcels_are_timed_both_ways_and_the_faster_one_stays(
    monkeypatch, full, delta, kept
):
    """`rollout.weight_sync=auto` between nodes: from packing, on the trainer, to loading."""
    now = [0.0]
    monkeypatch.setattr(disaggregated_actor.time, "perf_counter", lambda: now[0])
    policy, generator = actor(weight_sync="auto")
    packs = []

    def pack_weights(method):
        packs.append(method)
        now[0] += {"full": full / 2}.get(method, delta)
        return f"{method}:{len(packs)}"

    def load_weights(parcels, version):
        now[0] += full / 2 if "full" in parcels else 0.0
        generator.calls.append(("load_weights", parcels))
        return generator

    policy._trainer.pack_weights, generator.load_weights = pack_weights, load_weights
    loaded = []
    for _ in range(7):
        policy.update_actor("batch")
        policy.publish()
        now[0] += 100.0  # generation
        loaded.append(generator.loaded())
    assert packs == ["full", "delta", "full", "delta", *[kept] * 3]
    beside = [] if kept == "plain" else ["pack_whole_weights:0"]
    assert loaded[-1] == [f"{kept}:7", *beside]
