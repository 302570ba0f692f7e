"""Supervised fine-tuning on many conversations: memory of the driver, start, and speed.

    python benchmarks/streamed_data.py [--rows 1000000] [--tokens 1340]

Conversations are written as JSON lines into a temporary folder, then jobs start on them, each in a
process of its own: one on 64 rows, the first on all (it tokenizes them), the second (it maps what
the first has left), and, up to 20,000 rows, one that holds them in memory. Of each the seconds from
the job's start to the end of its first step, and the largest anonymous memory of the driver. Then
the second job learns from mapped rows and from the same rows in memory, in turn. The model is tiny;
tokens are characters.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from figures import SMOKE, interleave, report

TINY = {"hidden_size": 64, "layers": 2, "heads": 2, "context": 4096}
FEW, MOST_IN_MEMORY, STEPS, ROUNDS = 64, 20_000, 4, 5
GIB = 2.0**30


def write_conversations(file: Path, rows: int, tokens: int) -> None:
    """Write conversations of about so many characters."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghij", k=draw.randint(2, 9))) for _ in range(999)]
    with file.open("w") as lines:
        for number in range(rows):
            text = " ".join(draw.choices(words, k=tokens // 7))[:tokens]
            lines.write(
                json.dumps(
                    {"prompt": f"{number} {text[: tokens // 4]}", "response": text[tokens // 4 :]}
                )
                + "\n"
            )


class MemoryWatch(threading.Thread):
    """Notes the largest anonymous memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = 0

    def run(self) -> None:
        while True:
            status = Path("/proc/self/status").read_text()
            line = next(one for one in status.splitlines() if one.startswith("RssAnon:"))
            self.most = max(self.most, 1024 * int(line.split()[1]))
            time.sleep(0.05)


def run_job(file: str, cache: str, how: str) -> dict[str, Any]:
    """Start a job and make steps; return what it took.

    Args:
        how: `mapped`; `memory` tokenizes all rows in one go; `rate` also measures tokens per second
            of both.
    """
    begin, memory = time.perf_counter(), MemoryWatch()
    memory.start()
    from hybridrl.batch.batch import Batch
    from hybridrl.data import row_blocks
    from hybridrl.data.character_tokenizer import PRINTABLE_CHARACTERS, build_character_tokenizer
    from hybridrl.job.config_resolution import load_config
    from hybridrl.job.job import Job
    from hybridrl.models.model_loading import make_tiny_model

    row_blocks.SMALL_BYTES = 1 << 60 if how == "memory" else 0
    tokenizer = build_character_tokenizer(PRINTABLE_CHARACTERS)
    folder = make_tiny_model(Path(cache).with_name("model"), tokenizer, seed=0, **TINY)
    settings = ["algorithm=sft", "data=jsonl", f"data.path={file}", f"cache.folder={cache}"]
    settings += ["executor=inline", "devices=cpu", "num_devices=1", f"model.path={folder}"]
    settings += ["data.max_prompt_tokens=4096", "data.prompts_per_step=16", "trainer.epochs=1"]
    settings += ["rollout=transformers", f"run.root={Path(cache).with_name('runs')}"]
    with Job(load_config(settings)) as job:
        trainer = job.make_trainer()

        def step() -> int:
            batch, updates = trainer.step()
            for update in updates:
                update.get()
            return int(batch.collect(["response_mask"])["response_mask"].values.numel())

        step()
        found: dict[str, Any] = {"seconds": time.perf_counter() - begin, "anonymous": memory.most}
        if how == "rate":
            mapped, deal = job.feed.data, job.feed.deck.deal
            held = Batch(
                mapped.take(range(min(len(mapped), MOST_IN_MEMORY))).table.combine_chunks()
            )

            def rate(rows: Batch) -> float:
                job.feed.data = rows
                job.feed.deck.deal = lambda number: deal(number) % len(rows)
                start = time.perf_counter()
                tokens = sum(step() for _ in range(STEPS))
                return tokens / (time.perf_counter() - start)

            found["rates"] = interleave(lambda: rate(mapped), lambda: rate(held), ROUNDS)
        return found


def measure(*given: str) -> dict[str, Any]:
    """Run a job in a process of its own."""
    command = [sys.executable, __file__, "--job", *given]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16_000)
    parser.add_argument("--tokens", type=int, default=1340)
    parser.add_argument("--job", nargs=3)
    chosen = parser.parse_args()
    if chosen.job:
        print(json.dumps(run_job(*chosen.job)))
        return
    rows = 600 if SMOKE else chosen.rows
    with tempfile.TemporaryDirectory() as name:
        file, few, cache = (Path(name, part) for part in ("rows.jsonl", "few.jsonl", "cache"))
        write_conversations(file, rows, chosen.tokens)
        write_conversations(few, FEW, chosen.tokens)
        print(f"# {rows:,} conversations, {file.stat().st_size / GIB:.2f} GiB", flush=True)
        small = measure(str(few), str(cache), "memory")
        first = measure(str(file), str(cache), "mapped")
        second = measure(str(file), str(cache), "rate")
        size = sum(one.stat().st_size for one in cache.glob("rows/*/*")) / GIB
        print(f"# the cache holds {size:.2f} GiB", flush=True)
        starts = {"first": first, "second": second}
        if rows <= MOST_IN_MEMORY:
            starts["in memory"] = measure(str(file), str(cache), "memory")
        for which, found in starts.items():
            for figure, goal, unit, scale in (
                ("seconds", "10 s more at the second start", "s", 1.0),
                ("anonymous", "1 GiB", "GiB", GIB),
            ):
                ours, theirs = found[figure] / scale, small[figure] / scale
                report(f"{figure} to the first step, {which} start", ours, theirs, goal, unit)
        report("tokens/s, mapped against in memory", *second["rates"], "0.97", "tokens/s")


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
