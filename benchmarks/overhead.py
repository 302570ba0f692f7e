"""One GRPO step of the default job on two workers, against the same step written by hand.

    python benchmarks/overhead.py

The baseline is the loop at the end of this file: one process, vLLM and torch with a thread for each
core, padded batches, no Ray, no sharding, no checks. Both arms start from the same warmed-up model
and take the same number of prompts, samples and tokens.
"""

from __future__ import annotations

import os
import tempfile
import time

os.environ["TORCHDYNAMO_DISABLE"] = "1"
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"

import torch
from figures import interleave, report

from hybridrl import Job, load_config
from hybridrl.run.warmup import warm_up

ROUNDS = 15


class HandWritten:
    """GRPO on one process: the shortest program that does the step."""

    def __init__(self, folder: str, job: Job) -> None:
        from transformers import AutoModelForCausalLM
        from vllm import LLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.tokenizer = job.tokenizer
        rate = job.config.actor.optimizer.learning_rate
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate, weight_decay=0.0)
        threads = torch.get_num_threads()
        self.llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            max_model_len=job.context_length,
            max_num_seqs=job.config.rollout.max_sequences,
            kv_cache_memory_bytes=1 << 28,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        torch.set_num_threads = lambda number: None
        print("threads of the baseline:", torch.get_num_threads(), "of", threads)
        self.max_tokens = job.config.rollout.max_tokens
        self.samples = job.config.rollout.samples_per_prompt

    def step(self, prompts: list[list[int]], answers: list[str]) -> int:
        from vllm import SamplingParams

        eos = self.tokenizer.eos_token_id
        parameters = SamplingParams(
            n=self.samples,
            max_tokens=self.max_tokens,
            stop_token_ids=[eos],
            detokenize=False,
            logprobs=0,
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        rows, starts, scores = [], [], []
        for prompt, answer, output in zip(prompts, answers, outputs, strict=True):
            for completion in output.outputs:
                ids = list(completion.token_ids)
                rows.append(torch.tensor(prompt + ids))
                starts.append(len(prompt))
                text = self.tokenizer.decode(ids, skip_special_tokens=True)
                scores.append(float(text == answer))
        groups = torch.tensor(scores).view(-1, self.samples)
        advantages = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-6)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        places = torch.arange(ids.shape[1])[None]
        attention = places < lengths[:, None]
        mask = (attention & (places >= torch.tensor(starts)[:, None]))[:, 1:]
        logits = self.model(input_ids=ids, attention_mask=attention).logits[:, :-1]
        log_probs = torch.log_softmax(logits.float(), -1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        ratio = (log_probs - log_probs.detach()).exp()
        loss = -(ratio * advantages.view(-1, 1) * mask).sum() / mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        worker = self.llm.llm_engine.model_executor.driver_worker.worker
        worker.reload_weights(
            weights_iterator=((n, p.detach()) for n, p in self.model.named_parameters())
        )
        head = worker.get_model().lm_head
        head.quant_method.process_weights_after_loading(head)
        return int(mask.sum())


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run.root={folder}/runs",
            "warmup.steps=250",
            "actor.optimizer.learning_rate=1e-5",
        ]
        with Job(load_config(overrides)) as job:
            warm_up(job)
            job.groups["actor"].save_model(f"{folder}/model").get()
            trainer = job.make_trainer()
            baseline = HandWritten(f"{folder}/model", job)
            prompts = job.next_batch().collect(["prompt_ids", "answer"])
            ids = [row.tolist() for row in prompts["prompt_ids"].rows()]

            def ours() -> float:
                begin = time.perf_counter()
                for handle in trainer.step().updates:
                    handle.get()
                return time.perf_counter() - begin

            def by_hand() -> float:
                begin = time.perf_counter()
                baseline.step(ids, prompts["answer"])
                return time.perf_counter() - begin

            for _ in range(3):
                ours(), by_hand()
            seconds = interleave(ours, by_hand, ROUNDS)
            report("GRPO step on 2 workers", *seconds, "<= 1.25", "s")


if __name__ == "__main__":
    main()
