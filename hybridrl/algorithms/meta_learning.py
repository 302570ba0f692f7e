"""Meta-learning of pairwise preferences: weights of reward features that adapt to each task (MAML;
Finn et al. 2017, arXiv:1703.03400).

The reward of a response with the features z is w.z, and the weights w of a task are a shared start,
the first unit vector, plus the task's row of a table. All functions take the pairs of all tasks at
once, as the differences of their responses' features.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class InnerLoop(NamedTuple):
    """The adaptation to the support pairs of a task: steps of gradient descent on their mean loss,
    -log sigmoid(margin).

    Attributes:
        rate: Learning rate of a step.
        second_order: Whether gradients pass through the steps.
    """

    steps: int
    rate: float
    second_order: bool = True

    def adapt(self, rows: Tensor, differences: Tensor, tasks: Tensor) -> Tensor:
        """Return the adapted weights, `[tasks, features]`.

        Args:
            rows: `[tasks, features]`, where each task begins, as the difference to the shared
                start.
            differences: `[support pairs, features]`, features of the chosen response minus those
                of the rejected one.
            tasks: `[support pairs]`, the row of each pair's task. A task without pairs stays where
                it begins.
        """
        weights = rows + F.one_hot(rows.new_zeros((), dtype=torch.int64), rows.shape[1])
        counts = torch.bincount(tasks, minlength=len(rows)).clamp(min=1)
        with torch.enable_grad():
            if not weights.requires_grad:
                weights.requires_grad_()
            for _ in range(self.steps):
                losses = compute_pair_losses(weights, differences, tasks)
                (gradient,) = torch.autograd.grad(
                    (losses / counts[tasks]).sum(), weights, create_graph=self.second_order
                )
                weights = weights - self.rate * gradient
        return weights


class MetaGradients(NamedTuple):
    """The gradients of the query loss.

    Attributes:
        differences: `[pairs, features]`, with respect to the features' differences, of support
            pairs too.
        rows: `[tasks, features]`, with respect to where each task begins.
        loss: Of these tasks; ranks add theirs up.
        margins, shared_margins: `[pairs]`, w.z of each pair with the adapted weights and with the
            shared start.
    """

    differences: Tensor
    rows: Tensor
    loss: Tensor
    margins: Tensor
    shared_margins: Tensor


def compute_pair_losses(weights: Tensor, differences: Tensor, tasks: Tensor) -> Tensor:
    """Return -log sigmoid(w.z) of each pair, `[pairs]`."""
    return F.softplus(-(weights[tasks] * differences).sum(1))


def compute_meta_gradients(
    differences: Tensor,
    rows: Tensor,
    tasks: Tensor,
    is_query: Tensor,
    query_weights: Tensor,
    inner: InnerLoop,
) -> MetaGradients:
    """Compute the gradients of the outer loss: sum over query pairs of their weight times their
    loss at the weights that the support pairs of their task gave.

    Args:
        differences: `[pairs, features]`, of support and query pairs.
        rows: `[tasks, features]`, see `InnerLoop.adapt`.
        tasks: `[pairs]`, the row of each pair's task.
        is_query: `[pairs]`, bool.
        query_weights: `[pairs]`, 0 for support pairs.
    """
    differences, rows = differences.detach().requires_grad_(), rows.detach().requires_grad_()
    with torch.enable_grad():
        adapted = inner.adapt(rows, differences[~is_query], tasks[~is_query])
        losses = compute_pair_losses(adapted, differences, tasks)
        loss = (losses * query_weights).sum()
        of_differences, of_rows = torch.autograd.grad(loss, (differences, rows))
    margins = (adapted[tasks] * differences).sum(1).detach()
    shared = differences[:, 0].detach()
    return MetaGradients(of_differences, of_rows, loss.detach(), margins, shared)
