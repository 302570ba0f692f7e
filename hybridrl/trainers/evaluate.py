"""Evaluation without training: responses of a model, as it is, to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from hybridrl.config.effective_settings import trainer_settings
from hybridrl.config.schema import Config
from hybridrl.controller import BatchRef, Handle
from hybridrl.trainers import trainer as base
from hybridrl.trainers.role_spec import STANDARD_ROLES, RoleSpec, standard_roles


class Trainer(base.Trainer):
    """A driver program that evaluates and takes no steps."""

    USES = trainer_settings("evaluate")
    TRAINS = False

    @staticmethod
    def roles(config: Config) -> Mapping[str, RoleSpec]:
        return {
            "actor": replace(STANDARD_ROLES["actor"], saves_as=None),
            **standard_roles("reward"),
        }

    def step(self) -> tuple[BatchRef, list[Handle]]:
        raise NotImplementedError("The trainer `evaluate` takes no steps.")
