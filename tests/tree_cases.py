"""Rows that share prompts, and what plain torch says of each row alone."""

from types import SimpleNamespace

import torch
from small_models import SHAPE, build_seeded
from transformers import AutoModelForCausalLM, LlamaConfig

from hybridrl.algorithms import TokenLoss
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy

CPU = torch.device("cpu")
VOCABULARY, TEMPERATURE = 29, 0.8
# Prompt, and the responses to it: groups of unequal length, of one row, without tokens.
GROUPS = [
    (5, (3, 0, 7, 2)),
    (1, (4, 4)),
    (3, (6,)),
    (4, (0, 0)),
    (9, (1, 1, 20)),
    (2, (0,)),
    (2, (5, 1, 1, 1, 1, 13)),
]
LONGEST = 29


def make_model(attention=PACKED_ATTENTION):
    """The same model in every process, with tied heads, so that a pipeline has that too."""
    config = LlamaConfig(
        **SHAPE, vocab_size=VOCABULARY, tie_word_embeddings=True, pad_token_id=None
    )
    return build_seeded(AutoModelForCausalLM, config, attention)


def make_rows(shuffled=False, pairs=False):
    """The rows of all groups, those of a group next to each other unless they are shuffled."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(VOCABULARY, (count,), generator=generator)

    rows = []
    for prompt, responses in GROUPS:
        ids = draw(prompt)
        answers = [draw(n) for n in responses]
        rows += [(ids, one) for one in (answers * 2 if pairs else answers)]
    if shuffled:
        rows = [rows[n] for n in torch.randperm(len(rows), generator=generator)]
    bounds = torch.tensor([0, *(len(one) for _, one in rows)]).cumsum(0)
    weights = torch.randn(int(bounds[-1]), generator=generator)
    return Batch.from_columns(
        {
            "prompt_ids": [prompt for prompt, _ in rows],
            "response_ids": [one for _, one in rows],
            "response_mask": RaggedColumn(weights > -1, bounds),
            "loss_weights": RaggedColumn(weights, bounds),
        }
    )


def loss(outputs, *_):
    return TokenLoss(outputs["log_probs"] - 0.1 * outputs["entropy"], {})


def work_out(batch):
    """Of each row alone: log-probabilities, entropies; of all the loss and its gradient."""
    model, log_probs, entropies, total = make_model("eager"), [], [], 0.0
    for row in batch.to_pylist():
        if not (response := row["response_ids"]):
            continue
        ids = torch.tensor([row["prompt_ids"] + response])
        logits = model(ids).logits[0, len(row["prompt_ids"]) - 1 : -1] / TEMPERATURE
        spread = logits.log_softmax(-1)
        chosen = spread[torch.arange(len(response)), response]
        entropy = -(spread.exp() * spread).sum(-1)
        weights = torch.tensor(row["loss_weights"]) * torch.tensor(row["response_mask"])
        total = total + ((chosen - 0.1 * entropy) * weights).sum()
        log_probs.append(chosen.detach())
        entropies.append(entropy.detach())
    total.backward()
    return SimpleNamespace(
        log_probs=torch.cat(log_probs),
        entropy=torch.cat(entropies),
        loss=float(total.detach()),
        gradient={name: p.grad for name, p in model.named_parameters()},
    )


def make_engine(mesh, model=None, **settings):
    """An engine that learns nothing."""
    config = ActorConfig(**{"share_prefixes": "true", **settings})
    engine = TrainEngine(CausalPolicy(model or make_model()), mesh, "float32", config)
    standing = OptimizerConfig(learning_rate=0.0, max_grad_norm=0.0)
    engine.start_optimizer(standing, updates=1000)
    return engine
