"""Models and layouts for sequence parallelism, and what their ranks are compared with."""

from contextlib import contextmanager
from types import SimpleNamespace

import torch
import torch.distributed as dist
from small_models import SHAPE
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    Qwen2Config,
)

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import ParallelConfig
from hybridrl.layout.training_mesh import build_training_mesh
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.models.packed_samples import PackedSamples
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.parallel.sequence_parallel import SequenceParallel

CPU = torch.device("cpu")
VOCABULARY = 31
# Name: (dp, ring, ulysses).
LAYOUTS = {
    "ulysses2": (1, 1, 2),
    "ring2": (1, 2, 1),
    "ulysses2 x ring2": (1, 2, 2),
    "dp2 x ring2": (2, 2, 1),
    "dp2 x ulysses2": (2, 1, 2),
    "ring4": (1, 4, 1),
    "ulysses4": (1, 1, 4),
}
# Name: (class of the configuration, settings, what the model says and where).
MODELS = {
    "qwen2 gqa tied": (Qwen2Config, {"tie_word_embeddings": True}, "policy"),
    "llama gqa": (LlamaConfig, {"tie_word_embeddings": False}, "policy"),
    "llama mqa tied": (
        LlamaConfig,
        {"num_key_value_heads": 1, "tie_word_embeddings": True},
        "policy",
    ),
    "qwen2 mqa": (Qwen2Config, {"num_key_value_heads": 1}, "policy"),
    "llama critic": (LlamaConfig, {}, "before"),
    "qwen2 reward model": (Qwen2Config, {}, "after"),
}
# (prompt, response) lengths: not divisible by anything; shorter than a ring; no samples at all.
BATCHES = {
    "uneven": [(3, 2), (30, 31), (1, 1), (12, 5), (9, 9), (2, 0), (1, 16), (4, 1)],
    "short": [(1, 1), (2, 1), (1, 0), (1, 2)],
    "one token": [(1, 0)],
    "one long": [(5, 78)],
    "none": [],
}


def make_model(name, **settings):
    """A packed model, the same in every process; biases and norms matter too."""
    kind, own, says = MODELS[name]
    shape = SHAPE | {"vocab_size": VOCABULARY, "max_position_embeddings": 512, "num_labels": 1}
    policy = says == "policy"
    auto_class = AutoModelForCausalLM if policy else AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = auto_class.from_config(
            kind(**(shape | own | settings)), attn_implementation=PACKED_ATTENTION
        )
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.data += 0.3 * torch.randn_like(parameter)
    model.config.use_cache = False
    return CausalPolicy(model) if policy else ScalarModel(model, says)


def make_samples(lengths):
    generator = torch.Generator().manual_seed(0)
    prompts, responses = (
        [torch.randint(VOCABULARY, (pair[side],), generator=generator) for pair in lengths]
        for side in (0, 1)
    )
    if not lengths:
        return PackedSamples.of(
            Batch.from_columns(
                {"prompt_ids": [torch.zeros(1).long()], "response_ids": [torch.zeros(1).long()]}
            ).slice(0, 0),
            CPU,
        )
    return PackedSamples.of(
        Batch.from_columns({"prompt_ids": prompts, "response_ids": responses}), CPU
    )


def say(model, samples, sequence):
    if sequence is None:
        return model(samples)
    mine = sequence.split(samples, model.shift)
    return sequence.gather(model(mine), mine)


def outputs_and_gradients(model, samples, sequence=None):
    """What a model says, and the gradient of a weighted sum of it, by parameter; of the group's
    ranks together, if `sequence` divides the tokens over them."""
    outputs = say(model, samples, sequence)
    generator = torch.Generator().manual_seed(1)
    loss = sum((x * torch.randn(len(x), generator=generator)).sum() for x in outputs.values())
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])
    if sequence is not None:
        dist.all_reduce(gradients, group=sequence._group)
    found = gradients.split([p.numel() for p in parameters])
    return (
        {name: x.detach().clone() for name, x in outputs.items()},
        {n: g.view(p.shape) for n, g, p in zip(names, found, parameters, strict=True)},
    )


def layout(name, rank):
    """This rank's place in a layout, or None for a rank that the layout leaves out. Collective."""
    dp, ring, ulysses = LAYOUTS[name]
    ranks = dp * ring * ulysses
    mesh = ParallelMesh(build_training_mesh(ranks, ParallelConfig(ring=ring, ulysses=ulysses)), CPU)
    if rank >= ranks:
        return None
    return SimpleNamespace(
        dp=dp, dp_rank=mesh.index("dp"), mesh=mesh, sequence=SequenceParallel(mesh)
    )


@contextmanager
def counted_bytes():
    """Counts the bytes that this rank's collectives send to other ranks."""
    sent = {"ulysses": 0, "ring": 0, "gather": 0}
    originals = {
        name: getattr(dist, name)
        for name in ("all_to_all_single", "batch_isend_irecv", "all_gather")
    }

    def all_to_all_single(output, tensor, output_splits, input_splits, group):
        row = tensor[:1].nbytes if len(tensor) else 0
        own = input_splits[dist.get_rank(group)]
        sent["ulysses"] += row * (sum(input_splits) - own)
        return originals["all_to_all_single"](output, tensor, output_splits, input_splits, group)

    def batch_isend_irecv(operations):
        sent["ring"] += sum(op.tensor.nbytes for op in operations if op.op is dist.isend)
        return originals["batch_isend_irecv"](operations)

    def all_gather(outputs, tensor, group):
        sent["gather"] += tensor.nbytes * (len(outputs) - 1)
        return originals["all_gather"](outputs, tensor, group=group)

    for replacement in (all_to_all_single, batch_isend_irecv, all_gather):
        setattr(dist, replacement.__name__, replacement)
    try:
        yield sent
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def saved_bytes(model, samples, sequence=None):
    """Bytes that a forward keeps for its backward, each storage once, without parameters."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.is_floating_point() and storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage  # kept alive, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = say(model, samples, sequence)
    found = sum(storage.nbytes() for storage in storages.values())
    sum(x.sum() for x in outputs.values()).backward()  # peers wait in collectives otherwise
    return found
