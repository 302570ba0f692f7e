"""Checks of plans of precision (`models.<role>.precision`) against role, ranks and model."""

from __future__ import annotations

from typing import Any

from hybridrl.config.schema import Config, ParallelConfig
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.systems.low_bits.precision_plan import (
    SCORING,
    TRAINING,
    PrecisionPlan,
    find_precision_setting,
)
from hybridrl.trainers import load_roles
from hybridrl.trainers.role_spec import ACTOR_ROLE, RoleSpec


def resolve_precision_use(config: Config, role: str) -> tuple[str, str | None]:
    """Return what a role's plan is for, `scoring` or `training`, and the path of its model.

    Raises:
        ConfigError: for a role that is none, or that takes no plan.
    """
    roles = load_roles(config)
    if role not in roles:
        raise ConfigError(
            f"--role {role}: trainer.name={config.trainer.name} has {', '.join(roles)}."
            f"{suggest_name(role, roles)}"
        )
    spec = roles[role]
    if role == ACTOR_ROLE and spec.trains:
        return TRAINING, config.model.path
    if spec.worker != "reference":
        raise ConfigError(
            f"--role {role}: plans are made for `actor`, which is trained, and for language models "
            "that only score, such as `reference`. For others write the file by hand; see "
            "docs/precision.md."
        )
    return SCORING, spec.path(role, config) or config.model.path


def check_precision_plan(
    config: Config,
    role: str,
    spec: RoleSpec,
    cut: ParallelConfig,
    ranks: int,
    model: Any,
) -> None:
    """Refuse a precision plan that does not fit the role, its cut or its model.

    Args:
        cut: How its model is cut.
        ranks: That it has.
        model: Its configuration; None: nobody knows it here.

    Raises:
        ConfigError: names the setting, and what it does not go with.
    """
    if (found := find_precision_setting(config, role)) is None:
        return
    setting, path = found
    plan = PrecisionPlan.load(path, setting)
    said = f"{setting}={path}"
    use = TRAINING if role == ACTOR_ROLE else SCORING
    if plan.use != use:
        raise ConfigError(
            f"{said}: this plan is for {plan.use}, and the role `{role}` is "
            f"{'trained' if use == TRAINING else 'only scoring'}. Make one with "
            f"`hybridrl plan precision --role {role}`."
        )
    for axis in ("tp", "pp"):
        if (size := getattr(cut, axis)) > 1:
            raise ConfigError(
                f"{said} with {axis}={size}: layers in fewer bits are whole on each rank. Set "
                f"{axis}=1 for `{role}`, or leave {setting} out."
            )
    if spec.trains and config.actor.lora.rank:
        raise ConfigError(
            f"{said} with actor.lora.rank={config.actor.lora.rank}: adapters are trained around "
            "layers that are whole. Leave one of the two out."
        )
    if len(plan.ranks) not in (1, ranks):
        raise ConfigError(
            f"{said}: the plan is for {len(plan.ranks)} ranks, and `{role}` has {ranks}. Make it "
            "again for these, or leave one entry in `ranks`, which is then for all."
        )
    if config.model.dtype not in ("auto", plan.dtype):
        raise ConfigError(
            f"{said}: the plan is for model.dtype={plan.dtype}, and it is {config.model.dtype}. "
            "Make it again, or set that."
        )
    if model is not None:
        _check_model(said, plan, model)


def _check_model(said: str, plan: PrecisionPlan, model: Any) -> None:
    from hybridrl.quantization.low_bit_linear import check_linear_layers

    layers = model.get_text_config().num_hidden_layers
    if layers != plan.layers:
        raise ConfigError(
            f"{said}: the plan is for a model of {plan.layers} layers, and this one has {layers}. "
            "Make it again."
        )
    check_linear_layers(model, said, str(model.name_or_path or "the model"), cure="Leave it out.")
