"""FailedEpisodes: what is needed to look into an episode that failed, a file each."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybridrl.environments.episode_request import EpisodeRequest, EpisodeResult
from hybridrl.rollout.transcript import TokenTranscript
from hybridrl.system.redaction import redact

MOST_KEPT = 20
"""Files of each kind of failure that a replica keeps in a run."""


class FailedEpisodes:
    """Keeps the first failed episodes of each kind: row, traceback and transcript.

    Args:
        folder: Where; None: nothing is kept. It is made with the first file.
        replica: Begins the names of the files, so that replicas may share the folder.
        environment: What played them.
        tokenizer: Of the model.
    """

    def __init__(
        self,
        folder: Path | None,
        replica: int = 0,
        environment: str | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> None:
        self._folder, self._replica = folder, replica
        self._environment, self._tokenizer = environment, tokenizer
        there = [] if folder is None else folder.glob(f"{replica}-*.json")  # of a run that goes on
        self._kept = Counter(path.stem.split("-")[1] for path in there)

    def keep(
        self,
        play: EpisodeRequest,
        played: EpisodeResult,
        branches: Sequence[TokenTranscript],
        version: int,
    ) -> Path | None:
        """Write one; return its file, or None if there are enough, or the disk does not take it.

        Args:
            branches: What the model and the program had said so far.
            version: Of the policy when the generation began.
        """
        kind = played.kind
        if self._folder is None or self._kept[kind] >= MOST_KEPT:
            return None
        self._kept[kind] += 1
        path = self._folder / f"{self._replica}-{kind}-{self._kept[kind]:02d}.json"
        content = {
            "kind": kind,
            "failure": played.failure,
            "environment": self._environment,
            "episode": play.session,
            "greedy": play.greedy,
            "policy_version": version,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "row": dict(play.row),
            "transcript": [self._segments(branch) for branch in branches],
        }
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            text = redact(json.dumps(content, indent=1, default=str))
            path.write_text(text + "\n", encoding="utf-8")
        except OSError:  # a full disk is no reason to end the job here
            return None
        return path

    def _segments(self, branch: TokenTranscript) -> list[Mapping[str, Any]]:
        """Return a conversation in segments of the model's and of the program's tokens."""
        said = [(0, branch.prompt_ids)]
        numbered = zip(branch.mask, branch.response_ids, strict=True)
        for mask, group in groupby(numbered, key=lambda one: one[0]):
            said.append((mask, [token for _, token in group]))
        return [
            {
                "by": "model" if mask else "program",
                "text": None if self._tokenizer is None else self._tokenizer.decode(ids),
                "token_ids": list(ids),
            }
            for mask, ids in said
        ]
