"""Evaluation alone: answers to held-out prompts, of a model as it is."""

from __future__ import annotations

from typing import ClassVar

from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import base


class Trainer(base.Trainer):
    """A driver program that takes no steps."""

    TRAINS = False
    SAVED: ClassVar = {}

    @staticmethod
    def roles(config: Config) -> list[str]:
        return ["actor", "reward"]

    def step(self) -> tuple[BatchRef, list[Handle]]:
        raise NotImplementedError("The trainer `evaluate` takes no steps.")
