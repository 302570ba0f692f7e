"""The baseline arm of `versus_trl.py`: TRL's GRPOTrainer.

    python trl_arm.py --model FOLDER --prompts FILE.jsonl --steps 3 --samples 8 --max-tokens 512

It needs `trl==1.16.*` and `torch`, in an environment of their own, and nothing of HybridRL. A line
of JSON goes to standard output for every optimizer step, with the wall time of generation, reward
and update together; the first step is warm-up. `--prompts` takes lines of `{"prompt": "..."}`, of
which `--prompts-per-step` make a step, with `--samples` answers to each.

By default every core runs a process of its own, with one thread, and gloo averages the gradients;
`--processes 1` runs one process with a thread for each core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

MALLOC = {
    # Or glibc returns every large tensor to the system as it is freed, and pays for it again.
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(8 << 30),
}
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="folder of the model and its tokenizer")
    parser.add_argument("--prompts", required=True, type=Path, help='lines of {"prompt": "..."}')
    parser.add_argument("--steps", type=int, default=3, help="steps, of which the first is warm-up")
    parser.add_argument("--prompts-per-step", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8, help="answers to a prompt")
    parser.add_argument("--max-tokens", type=int, default=512, help="longest answer")
    parser.add_argument("--min-tokens", type=int, default=16, help="shortest answer")
    parser.add_argument("--threads", type=int, default=2, help="cores to use")
    parser.add_argument("--processes", type=int, help="that share the cores; default: one for each")
    parser.add_argument("--micro-batch", type=int, default=8, help="samples of a forward pass")
    parser.add_argument(
        "--dtype", default="float32", choices=["float32", "bfloat16"], help="of computation"
    )
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    arguments.processes = arguments.processes or arguments.threads
    arguments.samples_per_step = arguments.prompts_per_step * arguments.samples
    if arguments.threads % arguments.processes:
        parser.error("--processes must divide --threads.")
    if arguments.samples_per_step % (arguments.processes * arguments.micro_batch):
        parser.error("--processes * --micro-batch must divide --prompts-per-step * --samples.")
    return arguments


def start_processes(arguments: argparse.Namespace) -> None:
    """Replaces this process by the launcher of the ones that train."""
    environment = {
        **os.environ,
        **MALLOC,
        **QUIET,
        "OMP_NUM_THREADS": str(arguments.threads // arguments.processes),
    }
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={arguments.processes}", *sys.argv]
    os.execve(sys.executable, [sys.executable, *launcher], environment)


def train(arguments: argparse.Namespace, output: str) -> object:
    """Trains for `arguments.steps` steps in this process, which is one of `arguments.processes`;
    returns the trainer."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads // arguments.processes)
    lengths: list[int] = []

    def share_of_even_tokens(completion_ids: list[list[int]], **_: object) -> list[float]:
        lengths.extend(len(tokens) for tokens in completion_ids)
        return [sum(t % 2 == 0 for t in tokens) / len(tokens) for tokens in completion_ids]

    class StepReport(TrainerCallback):
        started = 0.0

        def on_step_begin(self, *_: object, **__: object) -> None:
            self.started = time.perf_counter()

        def on_step_end(self, _: object, state: object, *__: object, **___: object) -> None:
            # Gradients were averaged just now, so all processes come here at the same time.
            seconds = time.perf_counter() - self.started
            counts = torch.tensor([sum(lengths), len(lengths)])
            lengths.clear()
            if arguments.processes > 1:
                torch.distributed.all_reduce(counts)
            if state.is_world_process_zero:
                record = {
                    "step": state.global_step,
                    "seconds": round(seconds, 3),
                    "completion_tokens": int(counts[0]),
                    "samples": int(counts[1]),
                }
                print(json.dumps(record), flush=True)

    per_pass = arguments.processes * arguments.micro_batch
    config = GRPOConfig(
        output_dir=output,
        seed=arguments.seed,
        max_steps=arguments.steps,
        learning_rate=1e-7,  # the policy, and with it the lengths of its answers, must not move
        lr_scheduler_type="constant",
        per_device_train_batch_size=arguments.micro_batch,
        gradient_accumulation_steps=arguments.samples_per_step // per_pass,
        num_generations=arguments.samples,
        max_completion_length=arguments.max_tokens,
        generation_kwargs={"min_new_tokens": arguments.min_tokens},
        temperature=1.0,
        beta=0.0,
        num_iterations=1,
        loss_type="dapo",
        bf16=arguments.dtype == "bfloat16",
        gradient_checkpointing=False,
        use_cpu=True,
        ddp_backend="gloo",
        ddp_find_unused_parameters=False,
        dataloader_num_workers=0,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    with arguments.prompts.open() as file:
        prompts = [{"prompt": json.loads(line)["prompt"]} for line in file]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=share_of_even_tokens,
        args=config,
        train_dataset=Dataset.from_list(prompts),
        processing_class=AutoTokenizer.from_pretrained(arguments.model, padding_side="left"),
        callbacks=[StepReport()],
    )
    trainer.remove_callback(PrinterCallback)  # it prints a dictionary among the lines of JSON
    trainer.train()
    sys.stdout.flush()
    return trainer


def main() -> None:
    arguments = parse_arguments()
    if "LOCAL_RANK" not in os.environ:
        start_processes(arguments)
    with tempfile.TemporaryDirectory() as output:
        trainer = train(arguments, output)  # noqa: F841 - keeps its process group alive
    # Taking the gloo group apart hangs now and then, on one of two processes.
    os._exit(0)


if __name__ == "__main__":
    main()
