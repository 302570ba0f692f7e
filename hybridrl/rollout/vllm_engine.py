"""VLLMRollout: vLLM inside the worker's own process, on the job's own process group.

vLLM's `external_launcher` runs one engine in each rank; the ranks of one tensor-parallel group are
given the same prompts and make the same choices. Importing this module needs vLLM.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybridrl.batch.begun_responses import UNFINISHED
from hybridrl.batch.kept_sets import filters_tokens, restricts_sampling
from hybridrl.rollout.vllm_startup import VLLMProcessGroups, start_vllm

# isort: split
# That comes first, because it sets what vLLM reads when it is imported.
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from hybridrl.config.schema import RolloutConfig
from hybridrl.errors import HybridRLError, RolloutError
from hybridrl.rollout import vllm_expert_routes as vllm_routes
from hybridrl.rollout import vllm_weights
from hybridrl.rollout.loader_probe import LoaderProbeError
from hybridrl.rollout.rollout_engine import (
    EngineOutput,
    EngineSetup,
    Enough,
    Request,
    RolloutEngine,
    SamplingSettings,
)
from hybridrl.rollout.vllm_kept_tokens import SamplerRecorder
from hybridrl.rollout.vllm_lora import VLLMAdapter
from hybridrl.rollout.vllm_options import SPECULATIVE_OPTION
from hybridrl.rollout.weight_writer import WeightPieces, WeightWriter, find_weight_mismatches

DRAFTS = {
    "vllm:spec_decode_num_draft_tokens": "drafted_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}
"""vLLM's counters of tokens that were guessed ahead, and how we call them."""
_log = logging.getLogger(__name__)


class VLLMEngine(RolloutEngine):
    """One rank of a vLLM engine; ranks that share one must make the same calls. Requests of several
    turns need `rollout.parallel.tp=1`.

    Args:
        config: Memory and parallelism.
    """

    def __init__(self, setup: EngineSetup, config: RolloutConfig) -> None:
        self._adapters = None if setup.adapters is None else VLLMAdapter(setup.adapters)
        self.takes_adapters = self._adapters is not None
        self.awaits_weights = setup.coming is not None
        self.max_sequences = config.max_sequences
        self._device = setup.device
        self._eos_token_ids = list(setup.eos_token_ids)
        self._sleeps = setup.sleeps and setup.device.type != "cpu"
        self.keeps_weights = not self._sleeps or self.takes_adapters
        self._asleep = False
        self._has_cache = True
        self._has_generated = False
        self._replays = config.routing_replay
        self._recorder: vllm_routes.RouteRecorder | None = None
        self._sampler: SamplerRecorder | None = None
        self._running: dict[str, Request] = {}
        self._dropped: set[int] = set()  # of greedy requests that go on for others
        self._weights = 0  # how often they have changed
        self._pieces: WeightPieces = {}
        self._guesses = bool(config.engine_options.get(SPECULATIVE_OPTION))
        self._counted: dict[str, int] = {}
        self._groups = VLLMProcessGroups()
        self._groups.enter()
        self.keeps_sets, filters = restricts_sampling(config), filters_tokens(config)
        further = {} if self._adapters is None else dict(self._adapters.options)
        is_on_cpu = setup.device.type == "cpu"
        if filters and not is_on_cpu:
            further["return_sampling_mask"] = True
        self._llm = start_vllm(setup, config, further)
        # Collected some time later, it would destroy the process groups of the engine then in use.
        self._llm.llm_engine.engine_core._finalizer.detach()
        cache = self._llm.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager
        self._prefix_counts: Counter[str] = Counter()
        if cache.enable_caching:
            cache.record_prefix_cache_stats = self._count_prefix
        if self._replays:
            self.routes_dtype = vllm_routes.find_routes_dtype(self._worker.get_model())
        if self._replays and is_on_cpu:
            self._recorder = vllm_routes.RouteRecorder(self._llm.llm_engine, self._worker)
        if self.keeps_sets:
            self._sampler = SamplerRecorder(
                *(self._llm.llm_engine, self._worker, self._eos_token_ids),
                watches=filters and is_on_cpu,
            )

    def start(self, request: Request) -> None:
        self._take_cache()
        if request.sampling.temperature == 0:  # one sample stands for all
            self._start(request)
            return
        for one in request.split():  # vLLM gives all samples of one request at once
            self._start(one)

    def _start(self, request: Request) -> None:
        name, ids, salt = str(request.key), request.prompt_ids, str(self._weights)
        prompt = {"type": "token", "prompt_token_ids": ids, "cache_salt": salt}
        lora = None if self._adapters is None else self._adapters.request
        parameters = self._parameters(request.sampling, request.seed)
        self._llm.llm_engine.add_request(name, prompt, parameters, lora_request=lora)
        self._running[name] = request

    def poll(self, enough: Enough | None = None) -> list[EngineOutput]:
        """Run one step of the engine: one more token for each running sample."""
        self._groups.enter()
        with self._first_time():
            outputs = self._llm.llm_engine.step()
        found = [one for output in outputs if output.finished for one in self._finish(output)]
        if self._dropped:
            kept = [finished for finished in found if finished.key not in self._dropped]
            self._dropped.difference_update(finished.key for finished in found)
            return kept
        return found

    def _finish(self, output: Any) -> Iterator[EngineOutput]:
        """Yield the output for each sample that the one of a request stands for."""
        name = output.request_id
        request, (answer,) = self._running.pop(name), output.outputs
        routes = self._routes(output, answer) if self._replays else None
        kept = None
        if self._sampler is not None:
            masks = getattr(answer.sampling_mask, "token_ids", ())
            kept = self._sampler.take(request.sampling, name, len(answer.token_ids), masks)
        for number in range(request.samples):
            yield EngineOutput(
                request.key + number,
                list(output.prompt_token_ids),
                list(answer.token_ids),
                list(answer.logprobs.logprobs),
                answer.finish_reason,
                *(routes, kept),
            )

    def progress(self) -> dict[int, int]:
        return {key: request.num_output_tokens for key, request, _ in self._under_way()}

    def partial(self) -> dict[int, list[int]]:
        return {key: list(request.output_token_ids) for key, request, _ in self._under_way()}

    def interrupt(self) -> list[EngineOutput]:
        found = []
        for key, request, state in self._under_way():
            # The output processor has the tokens that have log-probabilities.
            tokens = list(state.detokenizer.output_token_ids)
            log_probs = list(state.logprobs_processor.logprobs.logprobs)
            prompt = list(request.prompt_token_ids)
            kept = None
            if self._sampler is not None:
                name = str(key)  # of a request of one sample
                masks = [m for c in state.sampling_mask_chunks for m in c.to_nested_list()]
                sampling = self._running[name].sampling
                kept = self._sampler.take(sampling, name, len(tokens), masks)
            found.append(EngineOutput(key, prompt, tokens, log_probs, UNFINISHED, None, kept))
        self.cancel()
        return found

    def _under_way(self) -> Iterator[tuple[int, Any, Any]]:
        """Yield vLLM's scheduler requests and output states, by the key of their sample."""
        engine = self._llm.llm_engine
        states = engine.output_processor.request_states
        for name, request in engine.engine_core.engine_core.scheduler.requests.items():
            yield int(vllm_routes.find_request_name(engine, name)), request, states[name]

    def abort(self, keys: Iterable[int]) -> None:
        keys = set(keys)
        over = []
        for name, request in self._running.items():
            own = set(range(int(name), int(name) + request.samples))
            self._dropped |= own & keys
            if own <= self._dropped:
                over.append(name)
                self._dropped -= own
        self._end(over)

    def cancel(self) -> None:
        self._end(list(self._running))
        self._dropped.clear()

    def _end(self, names: list[str]) -> None:
        self._llm.llm_engine.abort_request(names)
        for name in names:
            del self._running[name]
        for recorder in filter(None, (self._recorder, self._sampler)):
            recorder.forget(names)

    def _count_prefix(self, request: Any, cached_tokens: int) -> None:
        """Count what vLLM's scheduler found of a request in the prefix cache, in place of its own
        statistics, which would also count every token."""
        if not request.num_preemptions:  # else it finds what it has made itself
            self._prefix_counts.update(
                prompt_tokens=request.num_prompt_tokens, cached_tokens=cached_tokens
            )

    def counts(self) -> dict[str, int]:
        found = dict(self._prefix_counts)
        self._prefix_counts.clear()
        if self._guesses:
            metrics = self._llm.get_metrics()
            now = {metric.name: metric.value for metric in metrics if metric.name in DRAFTS}
            before, self._counted = self._counted, now
            found |= {DRAFTS[name]: value - before.get(name, 0) for name, value in now.items()}
        return found

    @contextmanager
    def _first_time(self) -> Iterator[None]:
        """Explain an error inside the block, unless the engine has generated before."""
        try:
            yield
        except Exception as error:  # of many kinds: models and devices have their own
            if self._has_generated or isinstance(error, HybridRLError):
                raise
            said = str(error).strip().partition("\n")[0]
            raise RolloutError(
                "vLLM has started with this model but cannot generate with it on this device "
                f"({type(error).__name__}{': ' * bool(said)}{said}). If vLLM does not run the "
                "model, or heads of its size, rollout=transformers generates with the class that "
                "is trained."
            ) from error
        self._has_generated = True

    def _take_cache(self) -> None:
        self._groups.enter()
        if self._asleep:
            self.wake()
        if not self._has_cache:
            self._llm.wake_up(tags=["kv_cache"])
            self._has_cache = True

    def _parameters(self, sampling: SamplingSettings, seed: int) -> SamplingParams:
        return SamplingParams(
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            max_tokens=sampling.max_tokens,
            min_p=sampling.min_p,
            min_tokens=sampling.min_tokens,
            stop=list(sampling.stop) or None,
            include_stop_str_in_output=True,
            stop_token_ids=[*self._eos_token_ids, *sampling.stop_token_ids],
            detokenize=bool(sampling.stop),
            logprobs=0,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _routes(self, request: Any, answer: Any) -> vllm_routes.ExpertRoutes:
        if self._recorder is not None:
            tokens = len(request.prompt_token_ids) + len(answer.token_ids) - 1
            return self._recorder.take(request.request_id, tokens)
        return vllm_routes.select_routes(self._worker.get_model(), answer.routed_experts)

    @property
    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker

    def pieces(self, shapes: Mapping[str, tuple[int, ...]]) -> WeightPieces | None:
        self._groups.enter()
        worker = self._worker
        try:
            found = vllm_weights.probe_vllm_model(worker.get_model(), worker.vllm_config, shapes)
        except LoaderProbeError as reason:
            _log.warning("weights go into vLLM as whole tensors, not as boxes: %s", reason)
            return None
        self._pieces = found
        return found

    def writer(self) -> WeightWriter:
        self._groups.enter()
        self._forget_prefixes()
        worker = self._worker
        return vllm_weights.VLLMWeightWriter(worker.get_model(), worker.vllm_config, self._pieces)

    @torch.no_grad()
    def differences(self, weights: Iterator[tuple[str, Tensor]]) -> list[str]:
        model, dtype = self._worker.get_model(), self._worker.vllm_config.model_config.dtype
        # Some of vLLM's parameters have more bits than what travels.
        travelled = ((name, weight.to(dtype)) for name, weight in weights)
        return find_weight_mismatches(
            travelled, self._pieces, partial(vllm_weights.list_engine_tensors, model)
        )

    @torch.no_grad()
    def load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        self._groups.enter()
        worker = self._worker
        if self._adapters is not None:
            self._adapters.load(worker, weights)
            self._forget_prefixes()
            return
        vllm_weights.drop_expert_kernels(worker.get_model())
        try:
            worker.reload_weights(weights_iterator=weights)
        except KeyError as error:
            raise RolloutError(
                f"vLLM's class of this model knows no weight {error}, which is the name that "
                "training has for it. rollout=transformers generates with the class that is "
                "trained."
            ) from error
        head = getattr(worker.get_model(), "lm_head", None)
        if head is not None and self._device.type == "cpu":
            # The CPU back end packs the output embedding when it is loaded; a tied one is not
            # loaded but shared, so its packed copy has to be made again.
            head.quant_method.process_weights_after_loading(head)
        self._forget_prefixes()

    def _forget_prefixes(self) -> None:
        """Give new requests another cache salt, so that no prefix of old weights is reused."""
        self._weights += 1
        self._llm.reset_prefix_cache()

    def wake(self) -> None:
        if self._sleeps and self._asleep:
            self._llm.wake_up(tags=["weights"])
        self._asleep = False

    def sleep(self) -> None:
        if self._sleeps and not self._asleep:
            # Level 2 drops weights, which come anew when they are needed; 1 keeps them on the CPU.
            self._llm.sleep(level=2 if self._adapters is None else 1)
            self._asleep, self._has_cache = True, False

    def close(self) -> None:
        self._llm.llm_engine.model_executor.shutdown()
