"""What training takes of one device: the engine's update against the device's rate of matrix
products and against a loop written by hand, the head, memory against the plan, offloading and
precision.

    python benchmarks/gpu.py                # a GPU: 1.5 billion parameters, 16,384 tokens
    python benchmarks/gpu.py --size tiny    # a CPU, in a minute; the default where there is no GPU

The job's own path is measured: its actor on the inline executor, which generates with transformers.
Neither Ray nor vLLM is imported, or has to be installed. The loop by hand has the same model with
torch's own attention over samples of equal length, bfloat16 copies of float32 weights, a head in
chunks and a fused AdamW; the two arms take turns.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
from figures import interleave, report
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl import Job, load_config
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.models.log_probs import token_log_probs
from hybridrl.planner.job_plan import build_job_plan
from hybridrl.planner.machine.device_catalog import ACCELERATORS, add_device_memory
from hybridrl.planner.step.step_calls import SampleLengths
from hybridrl.system.device_traits import synchronize_device

SIZES: dict[str, dict[str, Any]] = {
    "full": {  # Qwen2.5-1.5B
        "model": {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
        },
        "samples": (8, 512, 1536),
        "rounds": 8,
        "product": 8192,
    },
    "tiny": {
        "model": {
            "hidden_size": 256,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "vocab_size": 4096,
        },
        "samples": (4, 64, 192),
        "rounds": 3,
        "product": 1024,
    },
}
HEAD_TOKENS = 2048
"""Of a chunk of the loop's own head."""


def main() -> None:
    """Prints a line of JSON for each figure."""
    sys.modules["ray"] = sys.modules["vllm"] = None  # type: ignore[assignment] # not to be used
    has_gpu = torch.accelerator.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="full" if has_gpu else "tiny")
    parser.add_argument("--dtype", default="bfloat16" if has_gpu else "float32")
    parser.add_argument("--checkpointing", action="store_true", help="repeat each layer's forward")
    chosen = parser.parse_args()
    size = SIZES[chosen.size]
    if not has_gpu:
        torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="hybridrl-gpu-") as folder:
        batch = make_batch(*size["samples"], size["model"]["vocab_size"])
        with open_job(folder, size, chosen) as job:
            measure(job, batch, size, chosen)


def open_job(folder: str, size: dict[str, Any], chosen: argparse.Namespace) -> Job:
    """A GRPO job whose model has random weights and the letters of the built-in task."""
    from hybridrl.data.character_tokenizer import build_character_tokenizer
    from hybridrl.data.tasks import load_task

    rows, prompt, response = size["samples"]
    tokenizer = build_character_tokenizer(load_task(load_config([]).data.task).CHARACTERS)
    ids = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("bos", "eos")}
    config = Qwen2Config(**size["model"], **ids, tie_word_embeddings=True)
    torch.manual_seed(0)
    with torch.device(torch.accelerator.current_accelerator(check_available=True) or "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(f"{folder}/model")
    tokenizer.save_pretrained(f"{folder}/model")
    settings = [
        "executor=inline",
        "rollout=transformers",
        f"model.path={folder}/model",
        f"model.dtype={chosen.dtype}",
        f"run.root={folder}/runs",
        "actor.optimizer.learning_rate=1e-6",
        "actor.offload_between_calls=true",
        f"actor.gradient_checkpointing={str(chosen.checkpointing).lower()}",
        f"actor.tokens_per_microbatch={rows * (prompt + response)}",
        f"rollout.max_tokens={response}",
        f"data.prompts_per_step={rows // 2}",
        "rollout.samples_per_prompt=2",
        "rollout.max_sequences=8",
    ]
    return Job(load_config(settings))


def make_batch(rows: int, prompt: int, response: int, vocabulary: int) -> Batch:
    """Samples of equal length, with what an update reads."""
    generator = torch.Generator().manual_seed(0)
    bounds = torch.arange(rows + 1) * response
    tokens = rows * response
    ids = torch.randint(vocabulary, (rows, prompt), generator=generator)
    answers = torch.randint(vocabulary, (tokens,), generator=generator)

    def column(values: Tensor) -> RaggedColumn:
        return RaggedColumn(values, bounds)

    return Batch.from_columns(
        {
            "prompt_ids": list(ids),
            "response_ids": column(answers),
            "response_mask": column(torch.ones(tokens, dtype=torch.uint8)),
            "loss_weights": column(torch.full((tokens,), 1 / tokens)),
            "advantages": torch.randn(rows, generator=generator),
            "rollout_log_probs": column(torch.full((tokens,), -8.0)),
        }
    )


def measure(job: Job, batch: Batch, size: dict[str, Any], chosen: argparse.Namespace) -> None:
    """All figures of one job."""
    engine = job.executor._host._workers["actor"].model_engine
    device = engine.device
    actor = job.groups["actor"]
    reference = job.put(batch)

    def ours() -> float:
        begin = time.perf_counter()
        actor.update_actor(reference).get()
        synchronize_device(device)
        return time.perf_counter() - begin

    _precision(engine, batch, job, chosen.dtype)
    ours()  # makes the moments
    _memory(job, ours, device, size)
    _offload(engine, device)
    hand = HandWritten(job.model_path, batch, device, chosen)
    hand.step()
    seconds, baseline = interleave(ours, hand.step, size["rounds"])
    rows, prompt, response = size["samples"]
    report("hand_written_against_update", baseline, seconds, ">= 0.95", "s")
    rate, source = product_rate(device, chosen.dtype, size["product"])
    needed = operations(hand.model.config, rows, prompt + response, response)
    print(f"rate of matrix products: {rate / 1e12:.2f} T/s, {source}", flush=True)
    report("update_share_of_matrix_rate", needed / seconds, rate, ">= 0.45", "operations/s")
    del hand
    gc.collect()
    _head(engine, device, rows * response, size)


def operations(config: Any, rows: int, length: int, response: int) -> float:
    """Of a forward and backward: two for each parameter and token forward and four backward, causal
    attention over half of each sample, and the head for response tokens only."""
    width = config.hidden_size // config.num_attention_heads
    key_value = config.num_key_value_heads * width
    layer = config.hidden_size * (2 * config.hidden_size + 2 * key_value)
    layer += 3 * config.hidden_size * config.intermediate_size
    attention = 2 * length * config.hidden_size  # two products, over half of the places
    tokens = rows * length
    head = config.vocab_size * config.hidden_size * rows * response
    return (
        6.0 * tokens * config.num_hidden_layers * layer
        + 6.0 * head
        + (3.0 * tokens * config.num_hidden_layers * attention)
    )


def product_rate(device: torch.device, dtype: str, side: int) -> tuple[float, str]:
    """Operations per second of matrix products: as the maker says, or measured."""
    if device.type == "cuda" and dtype != "float32":
        name = torch.cuda.get_device_name(device)
        for kind, (facts, _) in ACCELERATORS.items():
            if kind.split("-")[0] in name.replace(" ", ""):
                return facts.flops["bfloat16"], f"as the maker says of {kind}"
    a, b = (torch.randn(side, side, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    best = float("inf")
    for _ in range(10):
        synchronize_device(device)
        begin = time.perf_counter()
        a @ b
        synchronize_device(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * side**3 / best, f"the best of ten products of {side} x {side}"


class HandWritten:
    """The shortest program that takes the same step: one process, no packing, no shards."""

    def __init__(
        self, folder: str, batch: Batch, device: torch.device, chosen: argparse.Namespace
    ) -> None:
        self.device, self.dtype = device, getattr(torch, chosen.dtype)
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa"
        ).to(device)
        self.master = [p.detach().clone().requires_grad_() for p in self.model.parameters()]
        self.model.to(self.dtype).train()
        if chosen.checkpointing:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.master, lr=1e-6, fused=True)
        prompts = torch.stack(list(batch["prompt_ids"].rows()))
        answers = torch.stack(list(batch["response_ids"].rows()))
        self.start = prompts.shape[1]
        self.ids = torch.cat([prompts, answers], 1).to(device)
        self.advantages = batch["advantages"].to(device)[:, None]

    def log_probs(self, states: Tensor, targets: Tensor) -> Tensor:
        """Of some tokens."""
        logits = self.model.lm_head(states).float()
        return torch.log_softmax(logits, -1).gather(-1, targets[:, None]).squeeze(-1)

    def step(self) -> float:
        """Seconds of forward, backward and optimizer."""
        begin = time.perf_counter()
        states = self.model.model(self.ids, use_cache=False).last_hidden_state
        states = states[:, self.start - 1 : -1].flatten(0, 1)
        targets = self.ids[:, self.start :].flatten()
        parts = zip(states.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
        found = [checkpoint(self.log_probs, *part, use_reentrant=False) for part in parts]
        log_probs = torch.cat(found).view(len(self.ids), -1)
        ratio = (log_probs - log_probs.detach()).exp()
        (-(ratio * self.advantages).mean()).backward()
        for master, parameter in zip(self.master, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(self.master, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(list(self.model.parameters()), self.master)
        synchronize_device(self.device)
        return time.perf_counter() - begin


def _memory(
    job: Job, step: Callable[[], float], device: torch.device, size: dict[str, Any]
) -> None:
    """The most that tensors take while training, against the plan."""
    _, prompt, response = size["samples"]
    plan = build_job_plan(
        job.config,
        add_device_memory(job.executor.cluster),
        job.placement,
        SampleLengths.alike(prompt, response),
        roles=job.roles,
    )
    parts = next(
        phase.parts
        for of_device in plan.memory
        for phase in of_device.phases
        if (phase.role, phase.phase) == ("actor", "train")
    )
    planned = sum(parts.values()) - parts["process"]
    if device.type == "cpu":
        print(f"planned for training: {planned / 2**20:.0f} MiB of tensors; not measured on a CPU")
        return
    torch.cuda.reset_peak_memory_stats(device)
    step()
    seen = torch.cuda.max_memory_allocated(device)
    report("peak_memory_against_plan", seen, planned, "0.85 to 1.15", "bytes")


def _precision(engine: Any, batch: Batch, job: Job, dtype: str) -> None:
    """How far the engine's log-probabilities are from transformers' in float32."""
    model = AutoModelForCausalLM.from_pretrained(job.model_path, dtype=torch.float32)
    model.to(engine.device).eval()
    few = batch.take([0])
    found = engine.forward(few)["log_probs"].values
    ids = torch.cat([few["prompt_ids"].values, few["response_ids"].values])[None].to(engine.device)
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    start = len(few["prompt_ids"].values)
    exact = torch.log_softmax(logits[start - 1 : -1], -1)
    exact = exact.gather(-1, ids[0, start:, None]).squeeze(-1).cpu()
    error = (found - exact).abs()
    print(f"largest error of a log-probability: {float(error.max()):.2e} ({dtype})")
    report("log_prob_error", float(error.mean()), 1.0, "<= 0.02 in bfloat16", "nats")


def _offload(engine: Any, device: torch.device) -> None:
    """Away to the host and back."""
    if device.type == "cpu":
        print("offload: there is nothing to offload from a CPU to", flush=True)
        return
    bytes_held = 12 * sum(p.numel() for p in engine.model.parameters())
    trips = []
    for _ in range(3):
        synchronize_device(device)
        begin = time.perf_counter()
        engine.offload()
        engine.onload()
        synchronize_device(device)
        trips.append(time.perf_counter() - begin)
    report("offload_round_trip", 2 * bytes_held / min(trips), 25e9, ">= 1", "bytes/s")


def _head(engine: Any, device: torch.device, tokens: int, size: dict[str, Any]) -> None:
    """Log-probabilities of a micro-batch's tokens, forward and backward."""
    generator = torch.Generator().manual_seed(0)
    hidden, vocabulary = size["model"]["hidden_size"], size["model"]["vocab_size"]
    dtype = torch.bfloat16 if device.type != "cpu" else torch.float32
    states = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) / hidden**0.5).to(device, dtype)
    weight.requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=generator).to(device)

    def timed(work: Callable[[], Tensor]) -> float:
        states.grad = weight.grad = None
        begin = time.perf_counter()
        work().backward()
        synchronize_device(device)
        return time.perf_counter() - begin

    def plain() -> Tensor:
        def of_some(some: Tensor, chosen: Tensor) -> Tensor:
            return torch.nn.functional.cross_entropy(
                (some @ weight.T).float(), chosen, reduction="sum"
            )

        parts = zip(states.split(HEAD_TOKENS), targets.split(HEAD_TOKENS), strict=True)
        return sum(checkpoint(of_some, *part, use_reentrant=False) for part in parts)  # type: ignore

    def ours() -> float:
        return timed(lambda: -token_log_probs(states, weight, targets)[0].sum())

    other, name = plain, "a head in chunks of torch's own"
    if find_spec("liger_kernel") and device.type != "cpu":
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        fused = LigerFusedLinearCrossEntropyLoss(reduction="sum")
        other, name = (lambda: fused(weight, states, targets)), "Liger's fused kernel"
    print(f"head: against {name}", flush=True)
    mine, theirs = interleave(ours, lambda: timed(other), size["rounds"])
    report("head", mine, theirs, "<= 1.2", "s")


if __name__ == "__main__":
    main()
