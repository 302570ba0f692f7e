"""A proof by trial that packed samples give a model's own log-probabilities, on a small copy of it.

The copy has the model's class and settings and random weights. It scores samples as training does,
and transformers scores each alone. Where these differ, the model would be trained on wrong
log-probabilities without a word: because something besides attention hands on states from token to
token (a convolution, a recurrence), which goes on into the next sample of a packed row; or because
attention or head do something that the packed forward does not know.
"""

from __future__ import annotations

import contextlib
import copy
import math

import torch
from transformers import PretrainedConfig

from hybridrl.errors import ConfigError
from hybridrl.models.language_model import architecture_key, check_scalar
from hybridrl.models.model_trial import TOLERANCE, ModelTrial, trial_seed
from hybridrl.models.packed_models import CausalPolicy, ScalarModel
from hybridrl.models.packed_samples import PackedSamples, SampleLayout

_SAMPLE_LENGTHS = (11, 40, 7)
"""Of the samples: the second is longer than a window and than what rotary positions were made
for."""
_ALIBI_MODEL_TYPES = ("bloom", "mpt")
"""Types of models that always do."""
_admitted: dict[str, SampleLayout] = {}


def resolve_sample_layout(
    config: PretrainedConfig, path: str, *, scalar: bool = False
) -> SampleLayout:
    """Return the layout of samples for the model, tried when it is first asked for.

    Args:
        scalar: The model has a scalar head instead of logits.

    Raises:
        ConfigError: in either way its log-probabilities, or values, would be wrong.
    """
    key = architecture_key(config, scalar)
    if key not in _admitted:
        _admitted[key] = _tried(config, path, scalar)
    return _admitted[key]


def _tried(config: PretrainedConfig, path: str, scalar: bool) -> SampleLayout:
    who = f"{path} ({config.model_type})"
    if scalar:
        check_scalar(config, who)
    rows, off = _trial(config, who, scalar)
    if rows is not None:
        return rows
    raise ConfigError(
        f"{who} cannot be trained here: {'values' if scalar else 'log-probabilities'} of samples "
        f"would be off by up to {off:.2g}, {_cause(config, who, scalar)} Qwen, Llama, Mistral, "
        "Gemma 3, OLMo, Phi 3, GLM, DeepSeek 3 and many others work."
    )


def _trial(config: PretrainedConfig, who: str, scalar: bool) -> tuple[SampleLayout | None, float]:
    """Return the layout that works (None: no layout does) and the error of the last one tried."""
    with trial_seed(), torch.no_grad():
        try:
            trial = ModelTrial(config, _SAMPLE_LENGTHS, scalar=scalar)
            expected = trial.reference_outputs()
        except Exception as error:  # of whatever kind: nobody knows what models will come
            why = str(error).partition("\n")[0][:300]
            raise ConfigError(
                f"{who} cannot be trained here: a small copy of it, which would prove that its "
                f"samples can be packed, does not run ({type(error).__name__}: {why})."
            ) from error
        ours, batch = trial.model, trial.batch()
        off = math.inf
        for rows in SampleLayout:
            model = ScalarModel(ours, "before", rows) if scalar else CausalPolicy(ours, rows)
            try:
                outputs = model.train()(PackedSamples.of(batch, torch.device("cpu"), rows))
            except Exception as error:
                raise ConfigError(
                    f"{who} cannot be trained here: its attention does not go through the "
                    "interface of transformers that packed samples need "
                    f"({type(error).__name__}: {error})."
                ) from error
            off = float((outputs[model.OUTPUTS[0]] - expected).abs().max())
            off = off if math.isfinite(off) else math.inf
            if off <= TOLERANCE:
                return rows, off
    return None, off


def _cause(config: PretrainedConfig, who: str, scalar: bool) -> str:
    """Return why the two forwards differ; a setting is blamed only if they agree without it."""
    for words, settings in _suspects(config).items():
        without = copy.deepcopy(config)
        for name, value in settings.items():
            setattr(without.get_text_config(), name, value)
        with contextlib.suppress(Exception):  # it may not run so
            if settings and _trial(without, who, scalar)[0] is not None:
                return f"because {words} ({', '.join(sorted(settings))} in its config.json)."
    if config.model_type in _ALIBI_MODEL_TYPES or getattr(config, "alibi", False):
        return "because positions are added to the scores of its attention (ALiBi)."
    return (
        "because its attention or its head does what the packed forward does not know, such as "
        "an encoder, or a scale or a bias of the logits."
    )


def _suspects(config: PretrainedConfig) -> dict[str, dict[str, float | None]]:
    """Return settings that change a forward, with values that would not."""
    set_so = config.get_text_config().to_dict()
    drops = [n for n, v in set_so.items() if "drop" in n and isinstance(v, float) and v > 0]
    return {
        "it drops out while it is trained, unless you set to 0 what says so": dict.fromkeys(
            drops, 0.0
        ),
        "it has a scale of the logits": {"logit_scale": 1.0} if set_so.get("logit_scale") else {},
    }
