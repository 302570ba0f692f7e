"""The tokens that vLLM left to choose from.

On GPUs vLLM says so itself (`return_sampling_mask`). Its runner for CPUs does not; there what the
sampler chose from in a step is put down to the requests of the step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from hybridrl.batch.kept_sets import (
    WHOLE_VOCABULARY,
    KeptSets,
    TokenSet,
    filters_tokens,
    find_token_sets,
)
from hybridrl.errors import RolloutError
from hybridrl.rollout.rollout_engine import SamplingSettings
from hybridrl.rollout.vllm_expert_routes import find_request_name


def list_end_free_sets(tokens: int, least: int, ends: Collection[int]) -> KeptSets:
    """Return the sets of a sample's tokens of which the first `least` did not end it."""
    found, first = KeptSets(), min(tokens, least)
    found.add(TokenSet(-len(set(ends)), sorted(set(ends))), first)
    found.add(WHOLE_VOCABULARY, tokens - first)
    return found


def convert_sampling_masks(masks: Iterable[Sequence[int]], vocabulary: int) -> KeptSets:
    """Return the sets that vLLM reports for a sample, a list of token ids for each token."""
    found = KeptSets()
    for ids in masks:
        if 2 * len(ids) > vocabulary:
            rest = np.setdiff1d(np.arange(vocabulary), ids, assume_unique=True).tolist()
            found.add(TokenSet(-len(rest), rest))
        else:
            found.add(TokenSet(len(ids), ids))
    return found


class SamplerRecorder:
    """A recorder of the sets that vLLM's sampler draws from.

    Args:
        engine: vLLM's, in this process.
        worker: Its worker.
        ends: Tokens that end a sample.
        watches: Whether its sampler has to be watched, as on CPUs.
    """

    def __init__(self, engine: Any, worker: Any, ends: Collection[int], *, watches: bool) -> None:
        self._engine, self._runner, self._ends = engine, worker.model_runner, ends
        self._vocabulary = worker.vllm_config.model_config.get_vocab_size()
        self._of_requests: dict[str, dict[int, TokenSet]] = {}
        self._watches = watches
        if watches:
            sampler = self._runner.sampler.topk_topp_sampler
            self._draw = sampler.forward
            sampler.forward = self._watched

    def take(
        self,
        sampling: SamplingSettings,
        request: str,
        tokens: int,
        masks: Iterable[Sequence[int]] = (),
    ) -> KeptSets:
        """Return the sets of the first tokens of a request, and drop all of it here.

        Args:
            masks: Those that vLLM reports, on GPUs.
        """
        held, found = self._of_requests.pop(request, {}), KeptSets()
        if sampling.temperature == 0 or not filters_tokens(sampling):
            return list_end_free_sets(
                tokens, sampling.min_tokens, [*self._ends, *sampling.stop_token_ids]
            )
        if not self._watches:
            return convert_sampling_masks(masks, self._vocabulary)
        for place in range(tokens):
            if place not in held:
                raise RolloutError(
                    f"vLLM's sampler was not seen choosing token {place} of a sample, so nobody "
                    "knows which tokens rollout.top_p, top_k or min_p left out there. "
                    "rollout=transformers generates with the class that is trained."
                )
            found.add(held[place])
        return found

    def forget(self, requests: Collection[str]) -> None:
        """Drop these requests."""
        for request in requests:
            self._of_requests.pop(request, None)

    def _watched(self, *args: Any, **options: Any) -> Any:
        sampled, log_probs = self._draw(*args, **options)
        batch = self._runner.input_batch
        for row, (name, found) in enumerate(
            zip(batch.req_ids, find_token_sets(log_probs), strict=True)
        ):
            # A prompt that is read in parts is drawn from after each; the last one counts.
            place = int(batch.num_tokens_no_spec[row] - batch.num_prompt_tokens[row])
            name = find_request_name(self._engine, name)
            self._of_requests.setdefault(name, {})[place] = found
        return sampled, log_probs
