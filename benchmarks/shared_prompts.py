"""Updates in which the samples of a prompt share its computation, against updates without.

    python benchmarks/shared_prompts.py

An update of one group of 8 samples of 256 tokens, through the training engine: the same rows with
`actor.share_prefixes=auto` and `false`. The last figure is of rows that have nothing to share. Time
is that of the processor; peaks of memory are those of a process for each arm.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from figures import SMOKE, interleave, report
from transformers import AutoModelForCausalLM, Qwen2Config

from hybridrl.algorithms import TokenLoss
from hybridrl.batch.batch import Batch, RaggedColumn
from hybridrl.config.schema import ActorConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.layout.rank_mesh import RankMesh
from hybridrl.models.packed_attention import PACKED_ATTENTION
from hybridrl.models.packed_models import CausalPolicy
from hybridrl.parallel.process_group import ParallelMesh

SAMPLES, RESPONSE, VOCABULARY, ROUNDS = 8, 256, 4096, 5
CASES = {
    "256": (256, True, ">= 1.7"),
    "1024": (1024, True, ">= 3.3"),
    "own": (256, False, ">= 0.97"),
}
"""Tokens of a prompt, whether the samples have the same one, and the goal."""
CPU = torch.device("cpu")


def main() -> None:
    """Prints a line of JSON for each figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden", type=int, default=64 if SMOKE else 256)
    parser.add_argument("--layers", type=int, default=2 if SMOKE else 4)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--peak-of", choices=["auto", "false"], help="prints that arm's peak only")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for case in chosen.cases:
        prompt, shares, goal = CASES[case]
        rows = group(prompt, shares)
        if chosen.peak_of:
            arm(chosen.peak_of, rows, chosen)()
            # Not that of `getrusage`, which is its parent's at least.
            status = Path("/proc/self/status").read_text()
            print(1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]))
            continue
        ours, baseline = (arm(setting, rows, chosen) for setting in ("auto", "false"))
        ours(), baseline()
        seconds = interleave(ours, baseline, chosen.rounds)
        what = f"of {prompt} tokens" if shares else "of their own"
        speed = seconds[1] / seconds[0]
        report(f"updates of samples with a prompt {what}: speed-up", speed, 1.0, goal, "x")
        if shares:
            peaks = (peak(setting, case) for setting in ("auto", "false"))
            report(f"the same: peak of memory, prompt of {prompt}", *peaks, "< 1", "bytes")


def group(prompt: int, shares: bool) -> Batch:
    """Samples to learn from."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, VOCABULARY, (SAMPLES, prompt), generator=generator)
    responses = torch.randint(3, VOCABULARY, (SAMPLES, RESPONSE), generator=generator)
    bounds = torch.arange(SAMPLES + 1) * RESPONSE
    ones = torch.ones(SAMPLES * RESPONSE)
    return Batch.from_columns(
        {
            "prompt_ids": [prompts[0 if shares else row] for row in range(SAMPLES)],
            "response_ids": RaggedColumn(responses.flatten(), bounds),
            "response_mask": RaggedColumn(ones.bool(), bounds),
            "loss_weights": RaggedColumn(ones / len(ones), bounds),
        }
    )


def arm(setting: str, rows: Batch, chosen: argparse.Namespace) -> Callable[[], float]:
    """What makes an update and gives its seconds."""
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=chosen.hidden,
        intermediate_size=4 * chosen.hidden,
        num_hidden_layers=chosen.layers,
        num_attention_heads=max(2, chosen.hidden // 64),
        num_key_value_heads=max(1, chosen.hidden // 128),
        max_position_embeddings=4096,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
    model.config.use_cache = False
    settings = ActorConfig(share_prefixes=setting, gradient_checkpointing="none")
    mesh = ParallelMesh(RankMesh({"dp": 1}), CPU)
    engine = TrainEngine(CausalPolicy(model), mesh, "float32", settings)
    engine.start_optimizer(OptimizerConfig(), updates=1000)

    def update() -> float:
        begin = time.process_time()
        engine.update(rows, lambda outputs, *_: TokenLoss(-outputs["log_probs"], {}))
        return time.process_time() - begin

    return update


def peak(setting: str, case: str) -> float:
    """The peak of a process with one arm only."""
    further = [*sys.argv[1:], "--peak-of", setting, "--cases", case]
    done = subprocess.run(
        [sys.executable, __file__, *further], capture_output=True, text=True, check=True
    )
    return float(done.stdout.split()[-1])


if __name__ == "__main__":
    main()
