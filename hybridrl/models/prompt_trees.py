"""PromptTrees: samples of one prompt in a packed row in which that prompt stands, and is computed,
once.

A tree is a prompt with the responses to it right behind. Each of these is a sample of its own for
causal attention, with positions that go on behind the prompt, and sees the prompt too. What
predicts the first token of a response is the prompt's last state, which therefore gets the sum of
the gradients of all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

from hybridrl.models.flash_attention import FlashCase, PromptCase
from hybridrl.models.token_ranges import concatenate_ranges
from hybridrl.system.device_traits import copy_to_device


@dataclass(frozen=True, eq=False)
class PromptTrees:
    """The trees of a packed row that is computed on `device`. All tensors are int64, on the CPU.

    Attributes:
        prompt_starts: `[rows of the batch]`, where each one's prompt stands, alone or shared.
        response_starts: Likewise of responses.
        bounds: `[samples + 1]` of the packed row: of prompts that are shared, responses to them,
            and samples that share nothing.
        starts: `[trees]`, ascending.
        prompts: `[trees]`, tokens of the prompt.
        responses: `[trees]`, tokens of all responses to it.
    """

    prompt_starts: Tensor
    response_starts: Tensor
    bounds: Tensor
    starts: Tensor
    prompts: Tensor
    responses: Tensor
    device: torch.device

    @classmethod
    def of(
        cls,
        prompts: Tensor,
        responses: Tensor,
        shared: Tensor,
        device: torch.device,
        multiple: int = 1,
    ) -> PromptTrees:
        """Lay out the rows of a batch.

        Args:
            prompts, responses: `[rows]`, the lengths.
            shared: bool `[rows]`, whether a row has the prompt of the row before it, of at least a
                token. The first has not.
            multiple: See `PackedSamples.of`.
        """
        lengths = torch.where(shared, 0, prompts) + responses
        ends = lengths.cumsum(0)
        response_starts = ends - responses
        tree = (~shared).cumsum(0) - 1
        starts = (ends - lengths)[~shared]
        answers = torch.zeros_like(starts).index_add_(0, tree, responses)
        is_tree = (tree.bincount() > 1) & (answers > 0)
        begin = [starts, response_starts[is_tree[tree]]]
        rest = torch.tensor([0, -int(ends[-1]) % multiple])
        return cls(
            starts[tree],
            response_starts,
            torch.cat([*begin, ends[-1] + rest]).unique(),
            *(starts[is_tree], prompts[~shared][is_tree], answers[is_tree], device),
        )

    @cached_property
    def offsets(self) -> Tensor:
        """The position of the first token of each of the packed row's samples, `[samples]`."""
        starts = self.bounds[:-1]
        tree = torch.searchsorted(self.starts, starts, right=True) - 1
        behind = starts - self.starts[tree]
        is_response = (tree >= 0) & (behind > 0)
        is_response &= behind < (self.prompts + self.responses)[tree]
        return torch.where(is_response, self.prompts[tree], 0)

    def find_prompts(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return, by tree, where the prompt's tokens begin among these places of the packed row,
        which are ascending, and how many there are."""
        return _find_ranges(places, self.starts, self.prompts)

    def find_responses(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the same as `find_prompts`, for the tokens of all responses."""
        return _find_ranges(places, self.starts + self.prompts, self.responses)

    def prompt_case(self, scale: float) -> PromptCase:
        """Return what responses see of their prompts, for flash attention."""
        queries, keys, query_bounds, key_bounds = self._seen_prompts
        longest, longest_key = int(self.responses.max()), int(self.prompts.max())
        case = FlashCase(query_bounds, longest, key_bounds, longest_key, False, scale)
        return PromptCase(queries, keys, case)

    @cached_property
    def _seen_prompts(self) -> list[Tensor]:
        lengths = self.responses, self.prompts
        starts = self.starts + self.prompts, self.starts
        places = map(concatenate_ranges, starts, lengths)
        bounds = (F.pad(x.cumsum(0), (1, 0)).to(torch.int32) for x in lengths)
        return [copy_to_device(x, self.device) for x in (*places, *bounds)]

    def split_row(self) -> tuple[list[int], list[Tensor]]:
        """Return the tokens before each tree, of its prompt and of its responses, for all trees in
        turn, and those after the last; and lengths of samples: of those that are no responses of
        trees, and of the responses of each tree."""
        edges = torch.stack([self.starts, self.starts + self.prompts], 1)
        edges = torch.cat([edges, edges[:, 1:] + self.responses[:, None]], 1).flatten()
        sizes = torch.cat([edges.new_zeros(1), edges, self.bounds[-1:]]).diff().tolist()
        lengths, is_response = self.bounds.diff(), self.offsets > 0
        tree = torch.searchsorted(self.starts, self.bounds[:-1][is_response], right=True) - 1
        return sizes, [
            lengths[~is_response],
            *lengths[is_response].split(tree.bincount().tolist()),
        ]


def _find_ranges(places: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    first, last = torch.searchsorted(places, torch.stack([starts, starts + lengths])).unbind()
    return first, last - first
