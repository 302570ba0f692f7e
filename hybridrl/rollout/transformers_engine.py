"""TransformersEngine: generates with transformers' own modules, on any device, and the sampler that
chooses its tokens.

The noise of a sample depends on the sample's own seed, not on the samples beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from hybridrl.batch.begun_responses import UNFINISHED
from hybridrl.batch.kept_sets import (
    WHOLE_VOCABULARY,
    KeptSets,
    find_token_sets,
    restricts_sampling,
)
from hybridrl.config.schema import RolloutConfig
from hybridrl.layout.boxes import Piece, full_box
from hybridrl.models.language_model import read_language_model
from hybridrl.models.model_loading import load_model_config, load_tokenizer
from hybridrl.rollout.rollout_engine import (
    BatchedEngine,
    EngineOutput,
    EngineSetup,
    Enough,
    Request,
    RolloutEngine,
    SamplingSettings,
)
from hybridrl.rollout.weight_writer import (
    EngineTensor,
    WeightPieces,
    WeightWriter,
    find_weight_mismatches,
)
from hybridrl.system.dtypes import DTYPES

_STOP_WINDOW_TOKENS = 32
"""In so many of the last tokens a text that ends a sample is looked for."""
_SEED, _PLACE, _TOKEN = 0x632BE59BD9B4E019, 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D
_FIRST, _SECOND = 0x3F58476D1CE4E5B9, 0x14D049BB133111EB
_START = 0x6A09E667F3BCC909  # without it all zeros would be mixed to zero
_BITS = 63
_BELOW_ONE = 1 - 2**-24  # the largest float32 below 1


class TokenSampler:
    """A sampler that draws the next tokens of a batch as `SamplingParams` say.

    Args:
        eos_token_ids: That end a sample, besides those of `sampling`.
        tokenizer: For texts that end one; None: no text does.
    """

    def __init__(
        self,
        sampling: SamplingSettings,
        eos_token_ids: Tensor,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> None:
        self._sampling = sampling
        further = eos_token_ids.new_tensor(sampling.stop_token_ids)
        self._eos = torch.cat([eos_token_ids, further])
        self._tokenizer = tokenizer
        self._warpers = _warpers(sampling)

    def choose(self, logits: Tensor, seeds: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Sample the next token of each sample and return it with its log-probability.

        Args:
            logits: ``[samples, vocabulary]``.
            seeds: Of each sample, ``[samples]`` int64.
            position: How many tokens each has already.

        Returns:
            ``[samples]`` int64 and float32.
        """
        return self.draw(self.compute_log_probs(logits, position), seeds, position)

    def compute_log_probs(self, logits: Tensor, position: int) -> Tensor:
        """Return the log-probabilities of all tokens, `[samples, vocabulary]`; minus infinity of
        those that are left out."""
        logits = logits.float()
        if position < self._sampling.min_tokens:
            logits[:, self._eos] = -torch.inf
        return torch.log_softmax(self._warpers(None, logits), dim=-1)

    def draw(self, log_probs: Tensor, seeds: Tensor, position: int) -> tuple[Tensor, Tensor]:
        """Choose tokens like `choose`, from log-probabilities."""
        if self._sampling.temperature == 0:
            tokens = log_probs.argmax(-1, keepdim=True)
        else:
            places = torch.full_like(seeds, position)
            noise = gumbel_noise(seeds, places, log_probs.shape[1])
            tokens = (log_probs + noise).argmax(-1, keepdim=True)
        return tokens.flatten(), log_probs.gather(1, tokens).flatten()

    def ends(self, tokens: Tensor) -> list[bool]:
        """Return for each token whether it ends its sample by itself."""
        return torch.isin(tokens, self._eos).tolist()

    def stops(self, token_ids: Sequence[int]) -> bool:
        """Return whether the last tokens of a sample complete a stop text."""
        if not self._sampling.stop:
            return False
        text = self._tokenizer.decode(token_ids[-_STOP_WINDOW_TOKENS:], skip_special_tokens=True)
        return any(stop in text for stop in self._sampling.stop)


def _warpers(sampling: SamplingSettings) -> LogitsProcessorList:
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k > 0:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    return warpers


def gumbel_noise(seeds: Tensor, places: Tensor, width: int) -> Tensor:
    """Return standard Gumbel noise, which depends on a sample's seed and the place in it alone:
    however samples are spread over devices and batches, each draws the same. The largest of
    log-probabilities to which it is added is a draw from them (Gumbel 1954, the "Gumbel-max
    trick").

    Args:
        seeds: Of each sample, ``[samples]`` int64.
        places: How many tokens each has already, ``[samples]`` int64.
        width: Size of the vocabulary.

    Returns:
        ``[samples, width]`` float32.
    """
    tokens = torch.arange(width, device=seeds.device)
    rows = _mix(_mix(seeds * _SEED + _START) + places * _PLACE)
    mixed = _mix(rows[:, None] + tokens * _TOKEN)
    return -torch.log(-torch.log1p(-uniform(mixed)))


def uniform(bits: Tensor) -> Tensor:
    """Uniform float32 numbers of random int64 bits, strictly between 0 and 1: from 2**-64 to
    1 - 2**-24, so that the logarithms of a number and of 1 minus it are finite. Float32 is fine
    near 0 and coarse near 1, so it is small numbers that should decide what is rare."""
    return ((_shifted(bits, 64 - _BITS).float() + 0.5) / 2**_BITS).clamp_(max=_BELOW_ONE)


def _mix(x: Tensor) -> Tensor:
    """Scramble 64 bits with multiplications and shifts as in SplitMix64 (Steele et al. 2014)."""
    x = (x ^ _shifted(x, 30)) * _FIRST
    x = (x ^ _shifted(x, 27)) * _SECOND
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, bits: int) -> Tensor:
    """Shift right as an unsigned number."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


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
        self.keeps_sets = restricts_sampling(config)
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

    generate = RolloutEngine.generate

    def _finish(
        self, requests: list[Request], enough: Enough | None = None
    ) -> Iterable[EngineOutput]:
        # Those that were begun first: a later batch may stop early.
        order = sorted(requests, key=lambda one: len(one.prompt_ids), reverse=enough is not None)
        samples = [_Sample(request) for request in order]
        for start in range(0, len(order), self.max_sequences):
            if self._generate(samples[start : start + self.max_sequences], enough):
                break
        return [
            EngineOutput(
                *(*sample.request[:2], sample.token_ids, sample.log_probs, sample.reason),
                kept=sample.kept if self.keeps_sets else None,
            )
            for sample in samples
        ]

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

    @torch.inference_mode()
    def _generate(self, samples: list[_Sample], enough: Enough | None) -> bool:
        """Generate samples of one distribution together, and return whether they were enough."""
        sampling = samples[0].request.sampling
        chooser = TokenSampler(sampling, self._eos, self._tokenizer)
        prompts = [torch.tensor(sample.request.prompt_ids) for sample in samples]
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.zeros(len(prompts), longest, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = prompt
            mask[row, longest - len(prompt) :] = 1
        ids, mask = ids.to(self._device), mask.to(self._device)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        seeds_left = torch.tensor([s.request.seed for s in samples], device=self._device)
        running = samples  # one for each row of the batch in the cache
        cache, position, are_enough = None, 0, False
        while True:
            output = self._model(
                input_ids=ids,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache = output.past_key_values
            log_probs = chooser.compute_log_probs(output.logits[:, -1], position)
            tokens, chosen = chooser.draw(log_probs, seeds_left, position)
            sets = find_token_sets(log_probs) if self.keeps_sets else [WHOLE_VOCABULARY] * len(ids)
            for sample, token, log_prob, end, found in zip(
                *(running, tokens.tolist(), chosen.tolist(), chooser.ends(tokens), sets),
                strict=True,
            ):
                if sample.reason != UNFINISHED:
                    continue
                sample.token_ids.append(token)
                sample.log_probs.append(log_prob)
                if self.keeps_sets:
                    sample.kept.add(found)
                if end or chooser.stops(sample.token_ids):
                    sample.reason = "stop"
                elif len(sample.token_ids) >= sample.request.sampling.max_tokens:
                    sample.reason = "length"
                if sample.reason != UNFINISHED and enough is not None:
                    are_enough = enough(sample.request.key)
            alive = [row for row, s in enumerate(running) if s.reason == UNFINISHED]
            if not alive or are_enough:
                return are_enough
            position += 1
            ids = tokens[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
            positions = positions[:, -1:] + 1
            if len(alive) <= len(running) // 2:
                keep = torch.tensor(alive, device=self._device)
                cache.batch_select_indices(keep)
                mask, ids, positions = mask[keep], ids[keep], positions[keep]
                seeds_left = seeds_left[keep]
                running = [running[row] for row in alive]


class _Sample:
    """A response under way."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.kept = KeptSets()
        self.reason = UNFINISHED
