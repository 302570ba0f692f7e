"""Checks of the program's roles and of `models.<role>` settings."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from hybridrl.checks.models.model_folder_checks import check_model
from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.trainers import load_roles, load_trainer
from hybridrl.trainers.role_spec import ACTOR_ROLE, SCORING_WORKERS, RoleSpec

_ACTOR_SETTING_NAMES = {
    "path": "model.path",
    "parallel": "actor.parallel",
    "optimizer": "actor.optimizer",
}
"""Settings of the role `actor`, which has them elsewhere."""


def check_roles(config: Config, roles: Mapping[str, RoleSpec] | None = None) -> None:
    """Refuse an unknown role, and a wrong setting of a role.

    Args:
        roles: Of a job, where they are not its trainer's alone.

    Raises:
        ConfigError: names the role, the setting and the nearest known one.
    """
    own = load_roles(config)
    known = {**own, **(roles or {})}
    for role in config.models:
        if role not in known:
            raise ConfigError(
                f"models.{role} is set, but trainer.name={config.trainer.name} has no role "
                f"`{role}`; it has {', '.join(known)}.{suggest_name(role, known)}"
            )
        _check_role_settings(config, role, known[role])
    warms_up = config.warmup.steps and load_trainer(config.trainer.name).DATA == "prompts"
    if warms_up and load_trainer(config.trainer.name).TRAINS and ACTOR_ROLE not in own:
        raise ConfigError(
            f"warmup.steps={config.warmup.steps} trains the role `{ACTOR_ROLE}`, but "
            f"trainer.name={config.trainer.name} has only {', '.join(own)}. Set warmup.steps=0."
        )


def find_ineffective_caches(config: Config, roles: Mapping[str, RoleSpec]) -> list[str]:
    """Return a sentence if `cache.use` names log-probabilities and no role scores with a model that
    does not learn. Workers of the user's may cache what they like."""
    scores = any(spec.worker == "reference" for spec in roles.values())
    has_own = any(not isinstance(spec.worker, str) for spec in roles.values())
    if "log_probs" not in config.cache.use or scores or has_own:
        return []
    return [
        f"cache.use=[{','.join(config.cache.use)}]: log_probs does nothing in this job, which has "
        f"no reference model; its roles are {', '.join(roles)}. Leave it out."
    ]


def check_role_models(
    config: Config, roles: Mapping[str, RoleSpec], but: Collection[str] = ()
) -> None:
    """Check the model folders of these roles for what each role does with its model.

    Args:
        but: Paths of models that are not looked at.

    Raises:
        ConfigError: names the setting and what is wrong with the folder.
    """
    seen = set()
    for role, spec in roles.items():
        if not spec.has_model(role, config):
            continue
        setting, path = find_model_setting(config, role, spec)
        use = (path, bool(spec.scalar), bool(spec.trains))
        if path is not None and path not in but and use not in seen:
            seen.add(use)
            check_model(path, setting, scalar=use[1], learns=use[2])


def find_model_setting(config: Config, role: str, spec: RoleSpec) -> tuple[str, str | None]:
    """Return the setting that names a role's model, and its value."""
    if spec.worker in SCORING_WORKERS:
        return f"{spec.worker}.model", spec.path(role, config)
    if (path := spec.path(role, config)) is not None:
        return f"models.{role}.path", path
    return "model.path", config.model.path


def _check_role_settings(config: Config, role: str, spec: RoleSpec) -> None:
    parse_role_model(config, role)  # refuses values of the wrong kind
    for name in config.models[role] or {}:
        setting = f"models.{role}.{name}"
        if role == ACTOR_ROLE and name in _ACTOR_SETTING_NAMES:
            raise ConfigError(f"{setting} is called {_ACTOR_SETTING_NAMES[name]}. Set that.")
        if name == "path" and spec.worker in SCORING_WORKERS:
            raise ConfigError(f"{setting} is called {spec.worker}.model. Set that.")
        takes = spec.takes or ()
        if name not in takes:
            raise ConfigError(
                f"There is no setting `{setting}`; the role `{role}` takes "
                f"{', '.join(takes)}.{suggest_name(name, takes)}"
            )
