"""Bytes that an optimizer remembers of the part of a model that a device trains."""

from __future__ import annotations

from hybridrl.config.schema import OptimizerConfig
from hybridrl.models.model_shape import ModelShape, count_row_blocks
from hybridrl.models.optimizer_states import find_state_form
from hybridrl.planner.memory.model_part import FLOAT32_BYTES, ModelPart
from hybridrl.system.dtypes import DTYPES


def count_state_bytes(config: OptimizerConfig, part: ModelPart, whole: ModelShape) -> float:
    """Count the bytes of an optimizer's state for all ranks that share the parameters of a part
    together.

    Args:
        whole: The shape of the model before tensor parallelism: statistics of rows and columns are
            of whole matrices, and each rank has all.
    """
    shape, layers, (first, last) = part.shape, part.layers, part.ends
    kinds, trained = shape.trained_kinds, part.parameters.trained
    hidden, vectors = kinds.hidden * layers, kinds.vectors * layers + last * shape.norm.trained
    tables = trained - hidden - vectors
    ends = [shape.embedding] if first or (last and shape.tied) else []
    ends += [shape.head] if last and not shape.tied else []
    rows = sum(end.trained for end in ends) / shape.hidden
    vector, held_hidden, held_tables = FLOAT32_BYTES, float(hidden), float(tables)
    if config.moments in DTYPES:
        vector = DTYPES[config.moments].itemsize
        held_hidden, held_tables = vector * held_hidden, vector * held_tables
    else:  # a byte each, and a number for each block
        held_hidden += FLOAT32_BYTES * kinds.blocks * layers
        held_tables += FLOAT32_BYTES * rows * count_row_blocks(shape.hidden)
    of_hidden, of_table = (find_state_form(config, 2, is_hidden) for is_hidden in (True, False))
    found = len(of_hidden.moments) * held_hidden + len(of_table.moments) * held_tables
    found += vector * len(find_state_form(config, 1, False).moments) * vectors
    if of_table.statistics:
        heights = sum(bool(end.trained) * end.all / shape.hidden for end in ends)
        widths = sum(bool(end.trained) for end in ends) * shape.hidden
        lines = whole.trained_kinds.lines * layers + heights * whole.vocabulary / max(
            1, shape.vocabulary
        )
        found += FLOAT32_BYTES * (lines + widths) * part.shards
    return float(found)


def count_gathered_bytes(config: OptimizerConfig, part: ModelPart) -> float:
    """Count the bytes that a step takes of one device for the matrices that it gathers: Muon's, in
    bfloat16, sharded and whole."""
    if config.name != "muon":
        return 0.0
    return 2.0 * 2 * part.shape.trained_kinds.hidden * part.layers / part.shards
