"""The generation of one batch in micro-batches that follow each other so that no stage waits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybridrl.rollout.transformers_engine import TokenSampler
from hybridrl.systems.unequal_generation.decode_micro_batch import (
    DecodeMicroBatch,
    mark_last_tokens,
)
from hybridrl.systems.unequal_generation.decoder_stage import DecoderStage
from hybridrl.systems.unequal_generation.stage_links import (
    PendingTensor,
    StageLinks,
    receive_tensor,
)


class PipelineGeneration:
    """A generation of micro-batches, which every stage visits in the same order.

    Args:
        stage: This rank's layers.
        links: To those of the others.
        groups: Without tokens so far.
        chooser: Of the last stage.
        pieces: Into so many parts a group is divided for the pass over its prompts.

    Attributes:
        log_probs: Of the last stage: of each group, by sample.
    """

    def __init__(
        self,
        stage: DecoderStage,
        links: StageLinks,
        groups: Sequence[DecodeMicroBatch],
        chooser: TokenSampler,
        pieces: int,
    ) -> None:
        self._stage, self._links, self._groups, self._chooser = stage, links, groups, chooser
        self._pieces = pieces
        self._states: dict[tuple[int, int], PendingTensor] = {}
        self._tokens: dict[int, PendingTensor] = {}
        self.log_probs: list[list[list[float]]] = [[[] for _ in g.token_ids] for g in groups]

    def run(self) -> None:
        """Run prefill and decode until every sample has ended."""
        self._prefill()
        while any(not group.is_over for group in self._groups):
            for number, group in enumerate(self._groups):
                if not group.is_over:
                    self._next_token(number, group)
        self._links.settle_all()

    def _prefill(self) -> None:
        visits = [
            (number, place, piece)
            for number, group in enumerate(self._groups)
            for place, piece in enumerate(group.pieces(self._pieces))
        ]
        logits: list[Tensor] = []
        for visit, (number, place, piece) in enumerate(visits):
            group = self._groups[number]
            for which in visits[visit : visit + 2]:  # the next one comes while this is computed
                self._expect_prompts(*which)
            group.cache.begin(piece.start, piece.stop)
            states = self._taken((number, place))
            ids = group.prompt_ids(piece) if self._stage.is_first else None
            found = self._stage(ids, states, *group.places(piece), group.cache)
            logits.append(found)
            if not self._links.is_last:
                self._links.send_states(number, found)
            if visits[visit + 1 : visit + 2] and visits[visit + 1][0] == number:
                continue
            group.cache.whole()
            self._end_pass(number, group, torch.cat(logits) if self._links.is_last else found)
            logits = []

    def _next_token(self, number: int, group: DecodeMicroBatch) -> None:
        if not self._links.is_last:
            group.take(receive_tensor(self._tokens.pop(number)))
            self._links.settle(number)
            if group.is_over:
                return
        self._expect_token(number)
        if self._links.is_last:
            # Here it is known what the others will send: they learned their tokens from here.
            self._expect_token(self._after(number))
        states = self._taken((number, -1))
        ids = group.last[:, None] if self._stage.is_first else None
        found = self._stage(ids, states, *group.places(), group.cache)
        if not self._links.is_last:
            self._links.send_states(number, found)
        self._end_pass(number, group, found)

    def _end_pass(self, number: int, group: DecodeMicroBatch, found: Tensor) -> None:
        """Sample a micro-batch's next tokens on the last stage; on others start to receive them."""
        if not self._links.is_last:
            self._tokens[number] = self._links.expect_tokens(len(group.rows))
            return
        tokens, log_probs = self._chooser.choose(found, group.seeds, group.position)
        said, ends = tokens.tolist(), self._chooser.ends(tokens)
        for place, (row, log_prob) in enumerate(zip(group.rows, log_probs.tolist(), strict=True)):
            if not group.ended[row]:
                self.log_probs[number][row].append(log_prob)
                text = [*group.token_ids[row], said[place]]
                ends[place] = ends[place] or self._chooser.stops(text)
        self._links.settle(number)
        tokens = mark_last_tokens(tokens, ends)
        self._links.tell_tokens(number, tokens)
        group.take(tokens)

    def _after(self, number: int) -> int:
        """Return the number of the micro-batch that is visited next."""
        places = [*range(number + 1, len(self._groups)), *range(number + 1)]
        after: int = next(place for place in places if not self._groups[place].is_over)
        return after

    def _expect_prompts(self, number: int, place: int, piece: slice) -> None:
        if not self._stage.is_first and (number, place) not in self._states:
            shape = piece.stop - piece.start, self._groups[number].longest, self._stage.hidden_size
            self._states[number, place] = self._links.expect_states(*shape)

    def _expect_token(self, number: int) -> None:
        if not self._stage.is_first and (number, -1) not in self._states:
            shape = len(self._groups[number].rows), 1, self._stage.hidden_size
            self._states[number, -1] = self._links.expect_states(*shape)

    def _taken(self, key: tuple[int, int]) -> Tensor | None:
        return None if self._stage.is_first else receive_tensor(self._states.pop(key))
