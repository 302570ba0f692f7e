"""Where loaders put the elements of a checkpoint, against loading tensors of element numbers."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hybridrl.layout.boxes import box_numel
from hybridrl.rollout.loader_probe import LoaderProbeError, probe_loader, record_raw_parameters
from hybridrl.rollout.weight_writer import box_slices


class Model(nn.Module):
    """Parameters of given shapes, and any function as `load_weights`."""

    def __init__(self, shapes, load):
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape), requires_grad=False))
        self.load = load
        record_raw_parameters(self)

    def load_weights(self, weights):
        for name, tensor in weights:
            self.load(self, name, tensor)


def numbered(shapes):
    """Checkpoint tensors of which no two elements are alike, none of them 0."""
    ends = torch.tensor([math.prod(shape) for shape in shapes.values()]).cumsum(0).tolist()
    return {
        name: torch.arange(end - math.prod(shape), end).float().reshape(shape) + 1
        for (name, shape), end in zip(shapes.items(), ends, strict=True)
    }


def assert_pieces_are_what_loading_does(model, shapes):
    checkpoint = numbered(shapes)
    pieces = probe_loader(model, shapes)
    assert all(not parameter.any() for parameter in model.parameters())  # nothing was loaded
    model.load_weights(iter(checkpoint.items()))
    for tensor, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter)
        for name, held in pieces.items():
            for piece in held:
                if piece.tensor == tensor:
                    place = tuple(
                        (first, first + stop - start)
                        for first, (start, stop) in zip(piece.start, piece.box, strict=True)
                    )
                    expected[box_slices(place)] = checkpoint[name][box_slices(piece.box)]
        assert torch.equal(parameter, expected), tensor
    return pieces


@st.composite
def fused(draw):
    """Parameters glued of boxes of checkpoint tensors, some with padding below."""
    shapes = {
        f"tensor{i}": (draw(st.integers(1, 9)), draw(st.integers(1, 9)))
        for i in range(draw(st.integers(1, 4)))
    }
    parameters, cuts = {}, []
    for p in range(draw(st.integers(1, 3))):
        width = draw(st.integers(1, min(shape[1] for shape in shapes.values())))
        row = 0
        for _ in range(draw(st.integers(1, 4))):
            name = draw(st.sampled_from(sorted(shapes)))
            top = draw(st.integers(0, shapes[name][0] - 1))
            height = draw(st.integers(1, shapes[name][0] - top))
            left = draw(st.integers(0, shapes[name][1] - width))
            cuts.append((name, (top, left), (height, width), f"parameter{p}", row))
            row += height
        padding = draw(st.integers(0, 3))
        if padding:
            cuts.append((None, (0, 0), (padding, width), f"parameter{p}", row))
        parameters[f"parameter{p}"] = (row + padding, width)
    return shapes, parameters, cuts


def load_cuts(cuts):
    def load(model, name, tensor):
        for origin, (top, left), (height, width), target, row in cuts:
            parameter = model.get_parameter(target)
            if origin == name:
                source = tensor.narrow(0, top, height)[:, left : left + width]
                parameter.data.narrow(0, row, height).copy_(source)
            elif origin is None and name == "tensor0":
                parameter[row : row + height].data.fill_(0)

    return load


@given(fused())
def test_pieces_are_the_element_numbers(case):
    shapes, parameters, cuts = case
    pieces = assert_pieces_are_what_loading_does(Model(parameters, load_cuts(cuts)), shapes)
    copies = sum(name is not None for name, *_ in cuts)
    assert (
        sum(map(len, pieces.values())) <= copies
    )  # what goes on where another ends is one with it


def test_experts_that_are_copied_one_by_one_are_few_boxes():
    """The second of two ranks: of every expert the lower half of its two upper matrices."""
    experts, width, hidden = 3, 4, 5

    def load(model, name, tensor):
        for half, matrices in enumerate(tensor.chunk(2, dim=1)):
            for expert, matrix in enumerate(matrices.unbind()):
                target = model.w13.data[expert].narrow(0, half * width // 2, width // 2)
                target.copy_(matrix.narrow(0, width // 2, width // 2))

    model = Model({"w13": (experts, width, hidden)}, load)
    pieces = assert_pieces_are_what_loading_does(model, {"gate_up": (experts, 2 * width, hidden)})
    assert [piece.start for piece in pieces["gate_up"]] == [(0, 0, 0), (0, 2, 0)]
    assert [piece.box[1] for piece in pieces["gate_up"]] == [(2, 4), (6, 8)]


def test_vectors_scalars_and_three_dims():
    shapes = {"bias": (6,), "scale": (), "kernel": (4, 3, 5), "unused": (2,)}

    def load(model, name, tensor):
        if name == "bias":
            model.bias.data.copy_(tensor[3:])
        elif name == "scale":
            model.scale.data.copy_(tensor)
        elif name == "kernel":
            model.kernel.data.copy_(tensor[1:3, :, 2:])

    model = Model({"bias": (3,), "scale": (), "kernel": (2, 3, 3)}, load)
    pieces = assert_pieces_are_what_loading_does(model, shapes)
    assert pieces["unused"] == ()
    assert sum(box_numel(piece.box) for held in pieces.values() for piece in held) == 3 + 1 + 18


def test_tied_parameters_are_one():
    model = Model({"embedding": (4, 2)}, lambda model, _, tensor: model.head.data.copy_(tensor))
    model.head = model.embedding
    record_raw_parameters(model)
    pieces = assert_pieces_are_what_loading_does(model, {"embedding": (4, 2)})
    assert [piece.tensor for piece in pieces["embedding"]] == ["embedding"]


def test_parameters_may_have_been_repacked_since():
    model = Model({"weight": (4, 2)}, lambda model, _, tensor: model.weight.data.copy_(tensor[4:]))
    before = probe_loader(model, {"w": (8, 2)})
    model.weight = packed = nn.Parameter(torch.zeros(0), requires_grad=False)
    assert probe_loader(model, {"w": (8, 2)}) == before
    assert model.weight is packed


def fail(model, tensor):
    raise KeyError("experts")


REFUSED = {
    "transposed": (lambda m, t: m.w.data.copy_(t.T), "not a box"),
    "every other row": (lambda m, t: m.w.data[:2].copy_(t[::2]), "not a box"),
    "reshaped": (lambda m, t: m.w.data.view(2, 8).copy_(t.view(2, 8)), "not a box"),
    "another number of dims": (lambda m, t: m.w.data.view(16).copy_(t.view(16)), "not a box"),
    "scaled": (lambda m, t: m.w.data.copy_(t * 2), "computed"),
    "changed before": (lambda m, t: m.w.data.copy_(t.mul_(2)), "not a plain copy"),
    "changed after": (lambda m, t: m.w.data.copy_(t).add_(1), "not a plain copy"),
    "permuted": (lambda m, t: m.w.data.copy_(t[torch.tensor([1, 0, 2, 3])]), "computed"),
    "converted": (lambda m, t: m.w.data.copy_(t.to(torch.float16)), "computed"),
    "as bits": (lambda m, t: m.w.data.view(torch.int32).copy_(t.view(torch.int32)), "not a box"),
    "repeated": (lambda m, t: m.w.data.copy_(t[:1]), "repeats"),
    "filled with ones": (lambda m, t: m.w.data.copy_(t).fill_(1), "not a plain copy"),
    "twice": (lambda m, t: (m.w.data.copy_(t), m.w.data[:1].copy_(t[1:2])), "written twice"),
    "in part": (lambda m, t: m.w.data[:3].copy_(t[:3]), "4 elements of w"),
    "not at all": (lambda m, t: None, "16 elements of w"),
    "from elsewhere": (lambda m, t: m.w.data.copy_(torch.ones(4, 4)), "computed"),
    "by an error": (fail, "KeyError: 'experts'"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_loaders_that_do_not_copy_boxes_are_refused(how):
    load, reason = REFUSED[how]
    model = Model({"w": (4, 4)}, lambda model, _, tensor: load(model, tensor))
    parameter = model.w
    with pytest.raises(LoaderProbeError, match=reason):
        probe_loader(model, {"t": (4, 4)})
    assert model.w is parameter and parameter.device.type == "cpu" and not parameter.any()
