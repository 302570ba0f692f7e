"""What layers keep of their forward, by `actor.gradient_checkpointing`."""

import pytest
import torch
from engine_cases import CPU, make_batch, make_model
from test_admission import FAMILIES
from tiers import few_of
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from hybridrl.config.schema import CHECKPOINTING_MODES, ActorConfig
from hybridrl.models import activation_checkpointing as checkpointing
from hybridrl.models.language_model import build_language_model
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.models.shrunk_config import shrink_config

ATTENTION = checkpointing.KEPT_OPERATIONS["block"]
PRODUCTS = set(checkpointing.KEPT_OPERATIONS["selective"]) - set(ATTENTION)


class Counted(TorchDispatchMode):
    """Matrix products, attentions and everything."""

    def __init__(self):
        super().__init__()
        self.products, self.attentions, self.all = 0, 0, 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.products += operation.name() in PRODUCTS
        self.attentions += operation.name() in ATTENTION
        self.all += 1
        return operation(*args, **(kwargs or {}))


def operations(kept):
    """Of a backward: matrix products, attentions, and all."""
    model = make_model()
    checkpointing.set_activation_checkpointing(model, kept)
    policy = CausalPolicy(model).train()
    states = policy.hidden(PackedSamples.of(make_batch(), CPU))
    with Counted() as counted:
        states.sum().backward()
    return counted.products, counted.attentions, counted.all


def test_what_is_not_kept_is_computed_again():
    none, selective, block, full, offload = (operations(kept) for kept in CHECKPOINTING_MODES)
    assert none[0] == selective[0] < block[0] == full[0] == offload[0]
    assert none[1] == selective[1] == block[1] == 0 < full[1] == offload[1]
    assert none[2] < selective[2] < block[2] < full[2]


@pytest.mark.parametrize("kept", ["selective", "block"])
@pytest.mark.parametrize("family", few_of(FAMILIES, ["gpt_oss"]))
def test_models_learn_the_same_whatever_is_kept(family, kept):
    """gpt_oss adds the biases of its experts to results in place."""
    rows, settings = FAMILIES[family]
    gradients = []
    for mode in ("none", kept):
        torch.manual_seed(0)
        config = shrink_config(AutoConfig.for_model(family, **settings), layers=2)
        model = build_language_model(config, attn_implementation=PACKED_ATTENTION)
        model.config.use_cache = False
        checkpointing.set_activation_checkpointing(model, mode)
        samples = PackedSamples.of(make_batch(), CPU, rows)
        CausalPolicy(model, rows).train()(samples)["log_probs"].sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    none, found = gradients
    assert none and none.keys() == found.keys()
    for name, gradient in none.items():
        torch.testing.assert_close(found[name], gradient, msg=name)


def test_offload_puts_the_inputs_of_layers_elsewhere(monkeypatch):
    moved = []

    class Host(saved_tensors_hooks):
        def __init__(self, pin_memory):
            super().__init__(self.pack, lambda tensor: tensor)

        def pack(self, tensor):
            moved.append(tuple(tensor.shape))
            return tensor

    monkeypatch.setattr(checkpointing, "save_on_cpu", Host)
    model = make_model()
    checkpointing.set_activation_checkpointing(model, "offload")
    samples = PackedSamples.of(make_batch(), CPU)
    states = CausalPolicy(model).train().hidden(samples)
    state = (1, samples.input_ids.numel(), states.shape[-1])
    assert moved.count(state) == len(model.model.layers)


@pytest.mark.parametrize(("said", "meant"), [(True, "full"), ("False", "none"), ("full", "full")])
def test_a_switch_means_all_or_nothing(said, meant):
    assert ActorConfig(gradient_checkpointing=said).gradient_checkpointing == meant
