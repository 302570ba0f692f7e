"""An engine that samples with a transformers model and its KV cache, without vLLM. Needs no
vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.layout.boxes import Piece, full_box
from hybridrl.models import load_model_config, load_tokenizer
from hybridrl.models.language_model import read_language_model
from hybridrl.rollout.engine_requests import SamplingSettings, build_response_batch, row_seeds
from hybridrl.rollout.rollout_engine import BatchedEngine, EngineSetup
from hybridrl.rollout.token_sampler import TokenSampler
from hybridrl.rollout.weight_writer import (
    EngineTensor,
    WeightPieces,
    WeightWriter,
    find_weight_mismatches,
)
from hybridrl.system.dtypes import DTYPES


class TransformersEngine(BatchedEngine):
    """A transformers model that generates for one replica, with its own copy of the weights.

    Prompts of similar length run together, `max_sequences` at a time; a finished sample leaves its
    place when half of the others have finished too, so a long tail runs in a small batch.
    """

    def __init__(self, setup: EngineSetup, config: RolloutConfig) -> None:
        super().__init__()
        self._device = setup.device
        self._tokenizer = load_tokenizer(setup.tokenizer)
        self.max_sequences = config.max_sequences
        self._eos = torch.tensor(setup.eos_token_ids, device=setup.device)
        path, model, as_is = setup.path, load_model_config(setup.path), DTYPES[setup.dtype]
        try:
            self._model, _ = read_language_model(
                path, model, dtype=as_is, attn_implementation="sdpa"
            )
        except ValueError:  # its attention does what the fused one does not know
            self._model, _ = read_language_model(
                path, model, dtype=as_is, attn_implementation="eager"
            )
        self._model.to(setup.device).eval().requires_grad_(False)

    @torch.inference_mode()
    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch:
        prompts = batch["prompt_ids"].rows()
        seeds = row_seeds(seed, len(prompts))
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        done: dict[int, _Sample] = {}
        for start in range(0, len(order), self.max_sequences):
            rows = order[start : start + self.max_sequences]
            samples = self._generate(
                [prompts[row] for row in rows], [seeds[row] for row in rows], sampling
            )
            done.update(zip(rows, samples, strict=True))
        found = [done[row] for row in range(len(prompts))]
        return build_response_batch(
            [sample.token_ids for sample in found],
            [sample.log_probs for sample in found],
            [sample.finish_reason for sample in found],
        )

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        parameters = dict(self._model.named_parameters())
        for name, tensor in weights:
            parameters[name].copy_(tensor)

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> WeightPieces:
        """Return one piece for each parameter: this engine has the checkpoint's own tensors."""
        return {
            name: (Piece(full_box(shape), name, (0,) * len(shape)),)
            for name, shape in shapes.items()
        }

    def writer(self) -> WeightWriter:
        return WeightWriter(dict(self._model.named_parameters()), self.pieces(self._shapes()))

    @torch.no_grad()
    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        model = self._model
        return find_weight_mismatches(
            weights,
            self.pieces(self._shapes()),
            lambda name: iter([EngineTensor(name, model.get_parameter(name))]),
        )

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self._model.named_parameters()}

    def _generate(
        self, prompts: list[Tensor], seeds: list[int], sampling: SamplingSettings
    ) -> list[_Sample]:
        chooser = TokenSampler(sampling, self._eos, self._tokenizer)
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        seeds_left = torch.tensor(seeds, device=self._device)
        samples = [_Sample() for _ in prompts]
        running = samples  # one for each row of the batch in the cache
        cache = None
        for position in range(sampling.max_tokens):
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            tokens, chosen = chooser.choose(output.logits[:, -1], seeds_left, position)
            for sample, token, log_prob, end in zip(
                running,
                tokens.tolist(),
                chosen.tolist(),
                chooser.ends(tokens),
                strict=True,
            ):
                if sample.finish_reason == "length":  # that is, not stopped yet
                    sample.token_ids.append(token)
                    sample.log_probs.append(log_prob)
                    if end or chooser.stops(sample.token_ids):
                        sample.finish_reason = "stop"
            alive = [row for row, s in enumerate(running) if s.finish_reason == "length"]
            if not alive:
                break
            ids = tokens[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
            if len(alive) <= len(running) // 2:
                keep = torch.tensor(alive, device=self._device)
                cache.batch_select_indices(keep)
                mask, ids, positions = mask[keep], ids[keep], positions[keep]
                seeds_left = seeds_left[keep]
                running = [running[row] for row in alive]
        return samples


class _Sample:
    """A response under way."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.finish_reason = "length"
