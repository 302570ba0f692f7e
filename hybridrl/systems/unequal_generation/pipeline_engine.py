"""An engine that generates on a pipeline of devices, unequal ones if need be, as a plan says. Each
has some neighbouring layers, in as many bits as a plan says.

Zhao et al. 2024, "LLM-PQ" (arXiv:2403.01136), on the layers of transformers; `planner` makes the
plans.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hybridrl.batch.batch import Batch
from hybridrl.config.schema import RolloutConfig
from hybridrl.layout.boxes import full_box, make_local_pieces
from hybridrl.models.model_loading import load_model_config, load_tokenizer
from hybridrl.quantization.low_bit_linear import LowBitLinear
from hybridrl.rollout.rollout_engine import (
    BatchedEngine,
    EngineOutput,
    EngineSetup,
    SamplingSettings,
    build_response_batch,
    row_seeds,
)
from hybridrl.rollout.transformers_engine import TokenSampler
from hybridrl.rollout.weight_writer import (
    EngineTensor,
    WeightPieces,
    WeightWriter,
    find_weight_mismatches,
)
from hybridrl.system.dtypes import DTYPES
from hybridrl.systems.unequal_generation.decode_micro_batch import DecodeMicroBatch
from hybridrl.systems.unequal_generation.decoder_stage import check_decoder_stages, load_stage
from hybridrl.systems.unequal_generation.generation_plan import (
    GenerationPlan,
    load_generation_plan,
    make_equal_plan,
    split_evenly,
)
from hybridrl.systems.unequal_generation.pipeline_generation import PipelineGeneration
from hybridrl.systems.unequal_generation.stage_links import StageLinks


class PipelineEngine(BatchedEngine):
    """One stage of a pipeline that generates; all ranks of the replica make the same calls.
    Building it is collective over the world.

    Prompts of similar length run together, `max_sequences` at a time, in the groups that the plan
    says; what a sample draws is what it draws from `TransformersEngine`, but for rounding.
    """

    def __init__(
        self, setup: EngineSetup, config: RolloutConfig, plan: GenerationPlan | None = None
    ) -> None:
        super().__init__()
        device, dtype = setup.device, setup.dtype
        plan = plan or _plan_of(setup.path, config)
        self._device, self._dtype, self._plan = device, DTYPES[dtype], plan
        self._tokenizer = load_tokenizer(setup.tokenizer)
        self.max_sequences = config.max_sequences
        self._eos = torch.tensor(setup.eos_token_ids, device=device)
        self._links = StageLinks(plan, self._dtype, device)
        number = self._links.stage
        bits = plan.stages[number].bits
        self._stage = load_stage(setup.path, plan.first_layer(number), bits, dtype, device)
        self._tensors = self._stage.tensors()

    @torch.inference_mode()
    def generate(
        self, batch: Batch, sampling: SamplingSettings, seed: int | Sequence[int]
    ) -> Batch:
        prompts = batch["prompt_ids"].rows()
        seeds = row_seeds(seed, len(prompts))
        order = sorted(range(len(prompts)), key=lambda row: len(prompts[row]))
        done: dict[int, tuple[list[int], list[float], str]] = {}
        for start in range(0, len(order), self.max_sequences):
            rows = order[start : start + self.max_sequences]
            found = self._generate(
                [prompts[row] for row in rows], [seeds[row] for row in rows], sampling
            )
            done.update(zip(rows, found, strict=True))
        return build_response_batch(
            [EngineOutput(row, [], *done[row]) for row in range(len(prompts))]
        )

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        writer = self.writer()
        for name, tensor in weights:
            if name in self._tensors:
                writer.write(name, (0,) * tensor.ndim, tensor)

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> WeightPieces:
        """Return the parameters of this stage whole, and no piece of others."""
        return {
            name: make_local_pieces(name, full_box(shape)) if name in self._tensors else ()
            for name, shape in shapes.items()
        }

    def writer(self) -> WeightWriter:
        return LowBitWeightWriter(
            self._tensors, self.pieces(self._shapes()), self._dtype, self._device
        )

    @torch.no_grad()
    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        return find_weight_mismatches(weights, self.pieces(self._shapes()), self._forms)

    def _forms(self, name: str) -> Iterator[EngineTensor]:
        kept = self._tensors[name]
        if isinstance(kept, LowBitLinear):
            yield EngineTensor(
                f"{name} in {kept.bits} bits", kept.dequantised(), self._rounds_as(kept)
            )
        else:
            yield EngineTensor(name, kept)

    def _rounds_as(self, layer: LowBitLinear) -> Callable[[Tensor], Tensor]:
        def rounded(values: Tensor) -> Tensor:
            twin = copy.copy(layer)
            twin.set_weight(values.to(self._dtype))
            return twin.dequantised()

        return rounded

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: _shape(kept) for name, kept in self._tensors.items()}

    def _generate(
        self, prompts: Sequence[Tensor], seeds: Sequence[int], sampling: SamplingSettings
    ) -> list[tuple[list[int], list[float], str]]:
        """Generate one batch; return tokens, log-probabilities and finish reason of each sample."""
        count = min(self._plan.decode_micro_batches, len(prompts))
        layers = len(self._plan.stages[self._links.stage].bits)
        groups = [
            DecodeMicroBatch(prompts[p], seeds[p], layers, sampling.max_tokens, self._device)
            for p in split_evenly(len(prompts), count)
        ]
        chooser = TokenSampler(sampling, self._eos, self._tokenizer)
        run = PipelineGeneration(
            self._stage, self._links, groups, chooser, self._plan.prefill_pieces
        )
        run.run()
        tokens = [row for group in groups for row in group.token_ids]
        ended = [end for group in groups for end in group.ended]
        lengths = [len(row) for row in tokens]
        said = torch.zeros(sum(lengths), device=self._device)
        if self._links.is_last:
            flat = [x for group in run.log_probs for row in group for x in row]
            said = torch.tensor(flat, device=self._device)
        log_probs = self._links.from_last(said).cpu().split(lengths)
        return [
            (row, values.tolist(), "stop" if end else "length")
            for row, values, end in zip(tokens, log_probs, ended, strict=True)
        ]


def _plan_of(path: str, config: RolloutConfig) -> GenerationPlan:
    """Return the plan of `rollout.plan`, or one of equal stages, for this model."""
    model = load_model_config(path)
    plan = make_equal_plan(model.get_text_config().num_hidden_layers, config.parallel.pp)
    if config.plan is not None:
        plan = load_generation_plan(config.plan)
    check_decoder_stages(model, "rollout=pipeline", path)
    return plan


class LowBitWeightWriter(WeightWriter):
    """A weight writer that rounds each low-bit layer when its weight is complete.

    Args:
        tensors: Parameters, or the layers that keep them rounded.
        pieces: What is to be written.
        dtype: In which weights come.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor | LowBitLinear],
        pieces: WeightPieces,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        plain = {name: kept for name, kept in tensors.items() if isinstance(kept, Tensor)}
        super().__init__(plain, pieces)
        self._rounded = {n: kept for n, kept in tensors.items() if isinstance(kept, LowBitLinear)}
        self._coming: dict[str, Tensor] = {}
        self._dtype, self._device = dtype, device

    def _target(self, tensor: str) -> Tensor:
        if tensor not in self._rounded:
            return super()._target(tensor)
        if tensor not in self._coming:
            shape = _shape(self._rounded[tensor])
            self._coming[tensor] = torch.empty(shape, dtype=self._dtype, device=self._device)
        return self._coming[tensor]

    def _complete(self, tensor: str) -> None:
        if tensor in self._coming:
            self._rounded[tensor].set_weight(self._coming.pop(tensor))


def _shape(kept: Tensor | LowBitLinear) -> tuple[int, ...]:
    if isinstance(kept, LowBitLinear):
        return kept.out_features, kept.in_features
    return tuple(kept.shape)
