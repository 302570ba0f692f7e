"""A check that the generator has the model that is trained, by the log-probabilities of the first
samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from hybridrl.config.schema import Config
from hybridrl.errors import TrainingError
from hybridrl.run.watchers.watcher import Finding, FinishedStep, Watcher
from hybridrl.trainers.objectives import find_low_bit_setting, has_lossy_weight_sync

_MAX_K3_BY_DTYPE = {"float32": 1e-4, "bfloat16": 0.05}
"""KL divergence (k3 estimate, a token) that rounding explains. Seen on CPUs: 1e-14 in float32 and
1e-5 in bfloat16; the rest is for larger models, whose tokens rounding may send to other experts,
and for kernels that add up in another order."""


_MAX_K3_LOW_BIT = 0.1
"""The same where generator or trainer compute in fewer bits (`rollout.quantization`,
`rollout.plan`, `models.actor.precision`)."""


class GeneratorCheck(Watcher):
    """Compares generator and trained model after the first step that learns from samples, also of a
    run that goes on; later steps may learn from samples of older policies."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._compared = False

    def on_step_end(self, step: FinishedStep) -> Sequence[Finding]:
        """Raises as `check_generator`."""
        if not self._compared and "mismatch/k3" in step.metrics:
            check_generator(self._config, step.metrics)
            self._compared = True
        return ()


def check_generator(config: Config, metrics: Mapping[str, float]) -> None:
    """Compare generator and trained model by the metrics of a step.

    Args:
        metrics: Of the step.

    Raises:
        TrainingError: if the generator is another model.
    """
    rollout = config.rollout
    is_rough = has_lossy_weight_sync(config)
    if is_rough and config.guard.most_mismatch is None:
        return  # the generator has other weights, as far as the person wished
    if "mismatch/k3" not in metrics or metrics.get("staleness/max", 0.0) > 0:
        return
    found = metrics["mismatch/k3"]
    precision, explained = config.model.dtype, _MAX_K3_BY_DTYPE[config.model.dtype]
    if setting := find_low_bit_setting(config):
        precision, explained = setting, _MAX_K3_LOW_BIT
    most = config.guard.most_mismatch or explained
    if math.isnan(found) and not math.isfinite(metrics.get("policy/loss", math.nan)):
        return  # the trainer's numbers are none either, which is the guard's affair
    if found <= most:
        return
    if is_rough:
        raise TrainingError(
            f"The generator is further from the model that is trained than guard.most_mismatch="
            f"{most:g} allows: mismatch/k3 is {found:.2g} with rollout.weight_sync="
            f"{rollout.weight_sync}, which brings weights there roughly. rollout.weight_sync=delta "
            "brings them exactly; a larger guard.most_mismatch lets the difference pass."
        )
    raise TrainingError(
        f"The generator is not the model that is trained: its log-probabilities of its own samples "
        f"are off by {metrics['mismatch/max_abs']:.2g} at most, mismatch/k3 is {found:.2g}, and "
        f"rounding in {precision} explains {most:g}. {rollout.engine}'s class for "
        f"this model computes something else on this device than transformers', which trains it. "
        "rollout=transformers generates with the class that is trained; guard.most_mismatch lets a "
        "larger difference pass, which algorithm.correction should then correct."
    )
