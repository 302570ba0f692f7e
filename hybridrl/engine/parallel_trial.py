"""A trial, on a small copy, that a model computes the same when it is split over ranks as the job
splits it.

Every rank makes the same small copy (`models.shrunk_config`), cuts it on the job's own mesh and
device, and has it score and learn from a few samples; transformers does the same on one process
with what is not cut. Log-probabilities and the norm of the gradient tell whether anything is
missing or counted twice, for a class of models that nobody has tried, or a version of a library.

The trial is in float32. Where a device has other attention kernels for bfloat16, and the job
computes in it, a second one is in bfloat16: it cannot tell rounding from the smallest mistakes, but
goes the way that the job will go.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist

from hybridrl.algorithms import TokenLoss
from hybridrl.config.schema import ActorConfig, LoraAdapterConfig, OptimizerConfig
from hybridrl.engine.train_engine import TrainEngine
from hybridrl.errors import ConfigError, HybridRLError
from hybridrl.models.language_model import architecture_key
from hybridrl.models.model_trial import TOLERANCE, ModelTrial, trial_seed
from hybridrl.models.packed_models import CausalPolicy, PackedModel, ScalarModel
from hybridrl.models.shrunk_config import SHRUNK_WINDOW
from hybridrl.parallel.collectives import reduce_over
from hybridrl.parallel.process_group import ParallelMesh
from hybridrl.system.device_traits import has_varlen_attention

_SAMPLE_LENGTHS = (SHRUNK_WINDOW, 5, SHRUNK_WINDOW - 1)
"""Of the samples: a ring takes none that are longer than a window."""
_MODEL_AXES = ("tp", "pp", "ulysses", "ring")
"""Axes over which a model's arithmetic is divided."""
_ROUNDING = 4 * torch.finfo(torch.bfloat16).eps
"""What each layer may add in bfloat16 to the error of outputs, and of the gradient's norm relative
to it: a few roundings, by half of eps each, that do not cancel. Whole copies of 12 architectures,
of 2 to 8 layers and four seeds, were off by a third of it at most; with a sum over ranks forgotten,
two layers were off by 1 in outputs, or by 0.09 in the norm."""

_proven: set[str] = set()


def check_parallel_equivalence(
    model: PackedModel,
    path: str,
    mesh: ParallelMesh,
    config: ActorConfig,
    dtype: str,
    *,
    trains: bool,
) -> None:
    """Run the trial the first time that a process asks for a split. Collective.

    Args:
        model: That is to be cut, whole or not read yet.
        path: Its name in messages.
        dtype: Name of the precision in which the job computes.
        trains: It is not only to score.

    Raises:
        ConfigError: on every rank, if the model would be another one.
    """
    sizes = {axis: mesh.size(axis) for axis in _MODEL_AXES if mesh.size(axis) > 1}
    has_kernel = has_varlen_attention(mesh.device.type)
    precisions = ["float32", *(["bfloat16"] if has_kernel and dtype == "bfloat16" else [])]
    facts = (type(model), sizes, config.parallel, trains, precisions)
    key = architecture_key(model.inner.config, *facts)
    if not sizes or key in _proven:
        return
    cut = ", ".join(f"actor.parallel.{axis}={size}" for axis, size in sizes.items())
    who = f"{path} ({model.inner.config.model_type}) cannot be cut by {cut}"
    cure = "Data parallelism alone (actor.parallel.tp=1 and so on) does not cut the arithmetic."
    for precision in precisions:
        with trial_seed():
            try:
                off, norm_off, tolerance = _differences(model, mesh, config, precision, trains)
            except HybridRLError:
                raise
            except Exception as error:  # of whatever kind: nobody knows what models will come
                raise ConfigError(
                    f"{who}: a small copy of it does not run so in {precision} "
                    f"({type(error).__name__}: {error}). {cure}"
                ) from error
        if max(off, norm_off) > tolerance:
            raise ConfigError(
                f"{who}: of a small copy of it that is cut so, in {precision}, {model.OUTPUTS[0]} "
                f"are off by {off:.2g}, and the norm of the gradient by {norm_off:.2g} of "
                f"it. {cure}"
            )
    _proven.add(key)


def _differences(
    model: PackedModel, mesh: ParallelMesh, config: ActorConfig, dtype: str, trains: bool
) -> tuple[float, float, float]:
    """Return the error of the outputs, and of the gradient norm relative to it, on the rank where
    they are largest, and how large they may be. Of outputs the largest error counts; in bfloat16
    the median, because rounding alone lets a router send a token to another expert where two are
    almost equal.
    """
    is_scalar, layers = isinstance(model, ScalarModel), mesh.size("pp") * config.parallel.chunks
    cuts = mesh.size("tp") * mesh.size("ulysses")
    trial = ModelTrial(
        model.inner.config, _SAMPLE_LENGTHS, scalar=is_scalar, cuts=cuts, layers=max(2, layers)
    )
    ours = trial.model
    copy = ScalarModel(ours, "before", model.rows) if is_scalar else CausalPolicy(ours, model.rows)
    # What they lose in fewer bits is no cut's fault.
    exact = replace(config.parallel, gradients="full", weights="full")
    settings = replace(
        config,
        **{"tokens_per_microbatch": sum(_SAMPLE_LENGTHS), "lora": LoraAdapterConfig()},
        **{"offload_parameters": False, "offload_optimizer": False},
        offload_between_calls=False,
        compile="false",  # it would take longer than the trial
        router_loss_weight=0.0,
        parallel=exact,
    )
    engine = TrainEngine(copy.requires_grad_(trains), mesh, dtype, settings)
    batch, name, is_exact = trial.batch(), model.OUTPUTS[0], dtype == "float32"
    found = engine.forward(batch)[name].values
    expected = trial.reference_outputs()
    off = norm_off = 0.0
    if mesh.index("pp") == mesh.size("pp") - 1:  # the last stage of a pipeline has them
        errors = (found - expected.detach()).abs()
        off = float(errors.max() if is_exact else errors.median())
    if trains:
        engine.start_optimizer(OptimizerConfig(), updates=1)
        norm = engine.update(batch, lambda outputs, *_: TokenLoss(outputs[name], {}))["grad_norm"]
        norm /= mesh.size("dp")  # all of them have the same samples
        expected.sum().backward()
        gradients = [p.grad for p in trial.reference.parameters() if p.grad is not None]
        norm_off = abs(norm / float(torch.stack([g.norm() for g in gradients]).norm()) - 1)
    worst = torch.tensor([off, norm_off]).nan_to_num(torch.inf)  # or no comparison would see it
    reduce_over(mesh.group(), worst, dist.ReduceOp.MAX)
    tolerance = (
        TOLERANCE if is_exact else _ROUNDING * ours.config.get_text_config().num_hidden_layers
    )
    return worst[0].item(), worst[1].item(), tolerance
