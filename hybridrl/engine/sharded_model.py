"""A model that is sharded over the ranks of a mesh, and access to its parameters as shards or in
full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hybridrl.checkpoint.tensors.file_plan import MAX_FILE_BYTES
from hybridrl.checkpoint.tensors.tensor_reader import TensorReader
from hybridrl.checkpoint.tensors.write_errors import convert_write_errors, raise_on_all_ranks
from hybridrl.config.schema import FULL_FORMAT, ActorConfig
from hybridrl.engine.compiled_layers import compile_layers
from hybridrl.engine.model_folder import (
    load_model_folder,
    materialize_parameters,
    save_model_folder,
)
from hybridrl.layout.boxes import full_box, make_local_pieces
from hybridrl.layout.tensor_layout import TensorLayout, make_tensor_sink
from hybridrl.layout.transfer_planner import plan_transfer
from hybridrl.models.activation_checkpointing import set_activation_checkpointing
from hybridrl.models.lora import find_peft_names, has_adapters, merge_adapters
from hybridrl.models.packed_models import PackedModel
from hybridrl.models.stored_tensors import StorageFormat, find_storage_format
from hybridrl.parallel import tensor_parallel
from hybridrl.parallel.fsdp import (
    apply_difference_gathers,
    apply_fsdp,
    is_small_model,
    list_fsdp_units,
)
from hybridrl.parallel.measured_reduction import MeasuredReduceScatter
from hybridrl.parallel.parameter_layout import build_training_layout
from hybridrl.parallel.process_group import ParallelMesh, to_local
from hybridrl.parallel.staged_model import StagedModel
from hybridrl.parallel.training_pipeline import TrainingPipeline
from hybridrl.system.dtypes import DTYPES
from hybridrl.weights.collective_reshard import CollectiveReshard


class ShardedModel:
    """A model that is split and sharded over the ranks of a mesh, in place, in the precision of its
    parameters: float32 if they are trained.

    Args:
        model: On the CPU or not read yet (on the meta device).
        mesh: How it is cut over the ranks.
        dtype: Name of the precision of computation.
        config: Gradient checkpointing, offload, pipeline chunks.
        files: That the model is of. If it is not read yet, every rank reads what is left to it.

    Attributes:
        model: What this rank runs.
        cuts: Of parameters that are cut over tensor-parallel ranks.
        has_adapters: Whether only adapters are trained.
        source: The files that the model is of; None: it is of none that are known here.
        loads: Number of times that weights were loaded in place of those it began with.
        forget_rounded: Drops what was rounded of the weights before they change, where a model that
            only scores computes in fewer bits.
    """

    def __init__(
        self,
        model: PackedModel,
        mesh: ParallelMesh,
        dtype: str,
        config: ActorConfig,
        files: TensorReader | None = None,
    ) -> None:
        self.source, self.loads = files, 0
        self.config = config
        self.forget_rounded: Callable[[], None] = lambda: None
        self.mesh, self.device = mesh, mesh.device
        self._layout: TensorLayout | None = None
        offload = config.offload_parameters and self.device.type != "cpu"
        self.has_adapters = has_adapters(model.inner)
        cuts = tensor_parallel.apply_tensor_parallel(model, mesh)
        self.cuts, self._partial = cuts.cuts, cuts.partial
        self._pipeline: TrainingPipeline | None = None
        if (group := mesh.group("pp")) is not None:
            self._pipeline = pipe = TrainingPipeline(group, config.parallel.chunks)
            model = StagedModel(model, DTYPES[dtype], pipe.rank, pipe.ranks, pipe.chunks)
        kept = config.gradient_checkpointing
        kept = compile_layers(model, config.compile, self.device, kept)
        set_activation_checkpointing(model.inner, kept)
        # Gathering gradients once per update, not per micro-batch, needs them whole in memory.
        # They are added up in the precision in which they travel; a unit sums those of one only,
        # and of two chunks the one that ran last has its own still in that of computation.
        reduce_dtype = DTYPES.get(config.parallel.gradients, torch.float32)
        is_float32 = reduce_dtype is torch.float32
        self._reduce_once = is_small_model(model) and is_float32 and config.parallel.chunks == 1
        # FSDP moves to the device what it shards, a module at a time: never the whole model.
        compressed = mesh.reduce_scatter if config.parallel.gradients != "full" else None
        self._measured = compressed if isinstance(compressed, MeasuredReduceScatter) else None
        self.model = apply_fsdp(
            *(model, mesh.fsdp, DTYPES[dtype]),
            offload=offload,
            reduce_scatter=compressed,
            reduce_dtype=reduce_dtype,
        )
        self._units = list_fsdp_units(self.model)
        by_difference = config.parallel.weights != "full" and mesh.fsdp.size() > mesh.copies
        self._gathers = apply_difference_gathers(self.model) if by_difference else []
        if files is not None and any(p.is_meta for p in self.model.inner.parameters()):
            place = torch.device("cpu") if offload else self.device
            materialize_parameters(self.model, files, self.cuts, place)
        self._averages: list[Tensor] | None = None  # see `load`
        self._began: dict[str, Tensor] = {}
        if self.begins_with_adapters:
            self._began = {name: part.clone() for name, part in self._adapter_parts().items()}

    def stored_form(self) -> StorageFormat | None:
        """The form in which the model is saved; see `find_storage_format`. Collective when
        first asked."""
        return find_storage_format(self.model.inner, self.layout().shapes, self.source)

    def take_said(self) -> list[str]:
        """Return the pending messages for the user about gradient reduction, each once."""
        if self._measured is None:
            return []
        said, self._measured.said = self._measured.said, []
        return said

    def layout(self) -> TensorLayout:
        """Return the tensor layout of the parameters over the mesh. Collective at the first
        call."""
        if self._layout is None:
            self._drop_gathered()
            parameters = dict(self.model.inner.named_parameters())
            self._layout = build_training_layout(parameters, self.cuts, self.mesh.group())
        return self._layout

    def local_parameters(self) -> dict[str, Tensor]:
        """Return this rank's shard of every parameter, float32."""
        self._drop_gathered()
        return {
            name: to_local(parameter.detach())
            for name, parameter in self.model.inner.named_parameters()
        }

    def full_parameters(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter, or those named, in full under its checkpoint name, one at a time.
        Collective."""
        self._drop_gathered()
        wanted = set(self.layout().shapes if names is None else names)
        if self.mesh.size("tp") * self.mesh.size("pp") > 1:
            layout = self.layout().renamed({n: n for n in self.layout().shapes if n in wanted})
            yield from gather_full_parameters(layout, self.local_parameters(), self.mesh)
            return
        for name, parameter in self.model.inner.named_parameters():
            if name not in wanted:
                continue
            whole = parameter.detach()
            if isinstance(whole, DTensor):
                whole = whole.to(self.device).full_tensor()
            yield name, whole

    def full_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter in full as `full_parameters` does, with adapters merged into
        their weights. Collective."""
        parameters = self.full_parameters()
        return merge_adapters(self.model.inner, parameters) if self.has_adapters else parameters

    def weights_for(self, adapters: bool) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights for a rollout engine: the adapters alone, or `full_weights`.
        Collective."""
        return self.adapters() if adapters else self.full_weights()

    def adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapters alone in full, under peft's names. Collective."""
        names = find_peft_names(self.model.inner, self.layout().shapes)
        for name, tensor in self.full_parameters(names):
            yield names[name], tensor

    @property
    def begins_with_adapters(self) -> bool:
        """True if the model differs from its folder before it is trained: `actor.lora.path`."""
        return self.has_adapters and self.config.lora.path is not None

    @property
    def differs_from_folder(self) -> bool:
        """True if what generates by the folder's weights is another model than this one before it
        is trained: this one begins with adapters, or its base is in fewer bits."""
        is_rounded = self.config.lora.base_format != FULL_FORMAT
        return self.has_adapters and (is_rounded or self.begins_with_adapters)

    @contextmanager
    def untrained(self) -> Iterator[None]:
        """Make `forward` answer for the model as it was before training, inside the block: without
        adapters, or with those that it began with."""
        if not self._began:
            with self._without_adapters():
                yield
            return
        now = {name: part.clone() for name, part in self._adapter_parts().items()}
        self._set_adapters(self._began)
        try:
            yield
        finally:
            self._set_adapters(now)

    def _adapter_parts(self) -> dict[str, Tensor]:
        return {n: part for n, part in self.local_parameters().items() if ".lora_" in n}

    @torch.no_grad()
    def _set_adapters(self, values: Mapping[str, Tensor]) -> None:
        for name, part in self._adapter_parts().items():
            part.copy_(values[name])

    @contextmanager
    def _without_adapters(self) -> Iterator[None]:
        layers = [m for m in self.model.modules() if hasattr(m, "_disable_adapters")]
        # Not by peft's own switch, which also turns gradients off: FSDP remembers that for good.
        for layer in layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in layers:
                layer._disable_adapters = False

    def save(
        self, folder: Path, dtype: torch.dtype = torch.float32, file_bytes: int = MAX_FILE_BYTES
    ) -> None:
        """Write the model, or its adapters alone, as a Hugging Face folder. Collective; every rank
        writes its shards, so all ranks must see the folder.

        Args:
            dtype: Of the weights in the files; adapters are float32.
            file_bytes: Largest file, unless one tensor is larger.

        Raises:
            StorageError: on all ranks, if one of them could not write.
        """
        inner = self.model.inner
        if (form := self.stored_form()) is not None:
            parts, dtype = self.local_parameters(), torch.float32 if self.has_adapters else dtype
            save_model_folder(
                inner, form, self.layout(), parts, self.mesh, folder, dtype, file_bytes
            )
            return
        # transformers changes what it saves, and must see it whole.
        state = {}
        for name, tensor in self.full_parameters():
            if self.mesh.is_first:
                state[name] = tensor.to("cpu", dtype)
        with raise_on_all_ranks(self.mesh.group()), convert_write_errors(folder):
            if self.mesh.is_first:
                inner.save_pretrained(folder, state_dict=state, max_shard_size=file_bytes)

    def load(self, folder: Path, share: float = 1.0) -> None:
        """Load the weights that a Hugging Face folder and this model have in common; see
        `load_model_folder`. Every rank reads its own shards.

        Args:
            share: Below 1: weights become this share of the folder's and the rest of their own. The
                averages stay on the CPU in float32, or small steps would be rounded away.
        """
        self.loads += 1
        self._drop_gathered()
        self.gather_anew()
        parts = [to_local(parameter.detach()) for parameter in self.model.parameters()]
        before = self._averages
        if share < 1.0 and before is None:
            before = [part.to("cpu", torch.float32, copy=True) for part in parts]
        load_model_folder(self.model.inner, folder, self.cuts)
        self._averages = None
        if share < 1.0 and before is not None:
            self._averages = [
                part.to("cpu", torch.float32).mul(share).add_(average, alpha=1.0 - share)
                for part, average in zip(parts, before, strict=True)
            ]
            for part, average in zip(parts, self._averages, strict=True):
                part.copy_(average)
        self.forget_rounded()

    def gather_anew(self) -> None:
        """Reset the gathered copies of weights (`parallel.weights`), so that they depend on nothing
        gathered before. Call it on every rank."""
        for gather in self._gathers:
            gather.begin_anew()

    def _drop_gathered(self) -> None:
        """Reshard the units that a forward leaves gathered for its backward. Gathered copies have
        the precision of computation and hide the parameters that are trained."""
        for unit in self._units:
            unit.reshard()


def gather_full_parameters(
    layout: TensorLayout, parts: Mapping[str, Tensor], mesh: ParallelMesh
) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter in full on every rank, in the dtype of the parts, one at a time.
    Collective.

    Args:
        layout: Of all ranks of `mesh`, more than one.
        parts: What this rank holds, by name.
    """
    dtype = next(iter(parts.values())).dtype
    for name, shape in layout.shapes.items():
        everything = {name: make_local_pieces(name, full_box(shape))}
        target = TensorLayout({name: shape}, dict.fromkeys(layout.pieces, everything))
        steps = plan_transfer(layout.renamed({name: name}), target, mesh.place)
        tensor = torch.empty(shape, dtype=dtype, device=mesh.device)
        bring = CollectiveReshard(steps, dtype, mesh.device, mesh.group())
        bring(parts.__getitem__, make_tensor_sink({name: tensor}))
        yield name, tensor
