"""The role of a teacher: a model of this job, or one behind a URL."""

from __future__ import annotations

from hybridrl.batch.kept_sets import restricts_sampling
from hybridrl.config.role_models import RemoteModelConfig, parse_group
from hybridrl.config.schema import Config, DistillationConfig, is_served
from hybridrl.errors import ConfigError
from hybridrl.trainers.role_spec import RoleSpec


def build_teacher_role(config: Config, name: str) -> RoleSpec:
    """Return the spec of a teacher that `models.<name>` describes.

    Raises:
        ConfigError: if it names no model, or one that cannot say what the settings ask for.
    """
    settings = config.distillation or DistillationConfig()
    setting, read = f"models.{name}", config.models.get(name) or {}
    top_k = 0 if settings.loss == "sampled" else settings.top_k
    keywords: dict[str, object] = {"top_k": top_k}
    if settings.alignment == "bytes":
        keywords |= {"alignment": "bytes", "system_prompt": config.data.system_prompt}
        _check_sampling(config, settings, f"distillation.alignment={settings.alignment}")
    if "url" not in read:
        if not read.get("path"):
            raise ConfigError(
                f"{setting}.path is not set: a teacher has a model of its own, with the tokenizer "
                f"of the student, or {setting}.url, the server that has it."
            )
        return RoleSpec("reference", keywords)
    parse_group(setting, RemoteModelConfig(), read)
    shown = f"{setting}.url={read['url']}"
    if not str(read["url"]).startswith(("http://", "https://")):
        raise ConfigError(f"{shown}: must begin with http:// or https://.")
    if (settings.alignment == "bytes") != (read.get("tokenizer") is not None):
        raise ConfigError(
            f"{shown} with distillation.alignment={settings.alignment} and {setting}.tokenizer="
            f"{read.get('tokenizer')}: a teacher with another tokenizer than the student's needs "
            "both distillation.alignment=bytes and its tokenizer, any other one neither."
        )
    samples = config.trainer.name != "offline_distillation"
    if samples and config.rollout.temperature != 1.0:
        raise ConfigError(
            f"{shown} with rollout.temperature={config.rollout.temperature}: the server's "
            "log-probabilities are those of temperature 1. Set rollout.temperature=1."
        )
    _check_sampling(config, settings, shown)
    return RoleSpec("remote_teacher", keywords)


def _check_sampling(config: Config, settings: DistillationConfig, shown: str) -> None:
    """Refuse samples whose tokens were drawn from some of the vocabulary only, and turns of others,
    where a teacher does not know of either."""
    rollout = config.rollout
    if settings.loss == "sampled" and restricts_sampling(rollout):
        raise ConfigError(
            f"{shown} with distillation.loss=sampled and samples drawn from a part of the "
            "vocabulary: the teacher does not know from which part. Set rollout.top_p=1 "
            "rollout.top_k=0 rollout.min_p=0 rollout.min_tokens=0, or distillation.loss=reverse."
        )
    if settings.alignment == "bytes" and (
        rollout.episode or is_served(rollout, config.environment)
    ):
        raise ConfigError(
            f"{shown} with episodes: turns of others are written in the student's chat template, "
            "which the teacher does not read. Leave the episode out, or take a teacher with the "
            "student's tokenizer."
        )
