"""The optimizers that settings name, and what each remembers of a parameter: the same answer for
those that train, save, plan and check.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon) steps the matrices of layers;
embeddings, output, routers, norms and biases are AdamW's. Adafactor (Shazeer and Stern 2018,
arXiv:1804.04235) keeps a mean over each row and each column of squared gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hybridrl.config.schema import OptimizerConfig
from hybridrl.errors import ConfigError, suggest_name
from hybridrl.system import user_code

SETTING = "actor.optimizer"
WHOLE_MATRIX_OPTIMIZERS = ("muon", "adafactor")
"""Those whose step of an element depends on the rest of its matrix."""
ELEMENTWISE = "elementwise"
"""Attribute of a user's class: its step of an element depends on that element alone."""
_STATISTICS = {"row_var": -1, "col_var": -2}
"""Adafactor's means by name, and the dim of the matrix over which each goes."""
_PROBED_SHAPE = (5, 3, 2)
_STEPS_BEFORE, _STEPS_AFTER = 2, 24
"""Steps of a probe after which its state is read, and at the end: what counts steps elsewhere, such
as until the slow weights of a lookahead follow, shows by then."""
_Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


OPTIONS: Mapping[str, Mapping[str, tuple[Any, str, _Check]]] = {
    "adamw": {},
    "muon": {
        "momentum": (0.95, "a number from 0 to below 1", lambda v: _is_number(v) and 0 <= v < 1),
        "nesterov": (True, "true or false", lambda v: isinstance(v, bool)),
        "ns_steps": (
            *(5, "a number from 1 to 20"),
            lambda v: _is_number(v) and v == int(v) and 1 <= v <= 20,
        ),
    },
    "adafactor": {
        "beta2_decay": (-0.8, "a number below 0", lambda v: _is_number(v) and v < 0),
        "d": (1.0, "a number above 0", lambda v: _is_number(v) and v > 0),
    },
}
"""Of each optimizer of the library the options: default, what it must be, and whether it is."""


class StateForm(NamedTuple):
    """The state that an optimizer keeps for one parameter.

    Attributes:
        moments: Names of tensors of the parameter's shape, sharded as it is.
        statistics: Names of `_STATISTICS`, which every rank that has a part of the parameter keeps
            whole.
        step: Kind of its count of steps, `step`: a tensor on the parameter's `device`, one on the
            `cpu`, a Python `number`, or none.
    """

    moments: tuple[str, ...] = ()
    statistics: tuple[str, ...] = ()
    step: str = ""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The names of all tensors."""
        return self.moments + self.statistics

    def make_step(self, count: float, device: torch.device) -> dict[str, Any]:
        """Return the part of a state that holds the count of steps."""
        if not self.step:
            return {}
        if self.step == "number":
            return {"step": int(count)}
        place = device if self.step == "device" else torch.device("cpu")
        return {"step": torch.tensor(count, dtype=torch.float32, device=place)}


_ADAMW = StateForm(("exp_avg", "exp_avg_sq"), step="device")


def statistic_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one of a `StateForm`'s statistics, for a parameter of this shape."""
    found = list(shape)
    found[_STATISTICS[name]] = 1
    return tuple(found)


def find_state_form(config: OptimizerConfig, ndim: int, is_hidden: bool) -> StateForm:
    """Return what the optimizer of these settings remembers of a parameter.

    Args:
        ndim: Dims of the parameter.
        is_hidden: It is one of `list_hidden_matrices`.

    Raises:
        ConfigError: see `probe_user_optimizer`.
    """
    match config.name:
        case "adamw":
            return _ADAMW
        case "muon":
            return StateForm(("momentum_buffer",)) if is_hidden else _ADAMW
        case "adafactor":
            matrix = StateForm(statistics=tuple(_STATISTICS), step="cpu")
            return matrix if ndim > 1 else StateForm(("variance",), step="cpu")
        case _:
            return probe_user_optimizer(config, ndim)


def read_options(config: OptimizerConfig, setting: str = SETTING) -> dict[str, Any]:
    """Return all options of an optimizer of the library, with the defaults of those not set.

    Raises:
        ConfigError: for one that it does not take, or a value that it cannot have.
    """
    known = OPTIONS[config.name]
    for option, value in config.options.items():
        if option not in known:
            raise ConfigError(
                f"{setting}.options has `{option}`, which {setting}.name={config.name} does not "
                f"take; it takes {', '.join(known) or 'none'}.{suggest_name(option, known)}"
            )
        _, wanted, is_valid = known[option]
        if not is_valid(value):
            raise ConfigError(f"{setting}.options.{option}={value}: must be {wanted}.")
    return {option: config.options.get(option, said[0]) for option, said in known.items()}


def load_user_optimizer(
    config: OptimizerConfig, setting: str = SETTING
) -> type[torch.optim.Optimizer]:
    """Return the user's class that `actor.optimizer.name` names.

    Raises:
        ConfigError: if there is none.
    """
    found = user_code.resolve_user_object(f"{setting}.name", config.name, OPTIONS)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ConfigError(
            f"{setting}.name={config.name} is no subclass of torch.optim.Optimizer. Name a class "
            "that is one, or a function's class in place of the function."
        )
    return found


def make_user_optimizer(
    config: OptimizerConfig, groups: list[dict[str, Any]], setting: str = SETTING
) -> torch.optim.Optimizer:
    """Make the user's optimizer over groups of parameters.

    Raises:
        ConfigError: if its class does not take them, the rate, or the options.
    """
    kind = load_user_optimizer(config, setting)
    if "weight_decay" in config.options:
        raise ConfigError(
            f"{setting}.options has `weight_decay`, which each group of parameters has already, 0 "
            f"for biases and norms. Set {setting}.weight_decay."
        )
    try:
        return kind(groups, lr=config.learning_rate, **config.options)  # type: ignore[call-arg]
    except Exception as error:
        raise ConfigError(
            f"{setting}.name={config.name}: making it from groups of parameters, lr="
            f"{config.learning_rate} and {setting}.options={config.options} raised "
            f"{type(error).__name__}: {error}"
        ) from error


def probe_user_optimizer(config: OptimizerConfig, ndim: int, setting: str = SETTING) -> StateForm:
    """Find what a user's optimizer remembers of a parameter, by steps on a small one, and whether
    that is all that its next steps depend on.

    Raises:
        ConfigError: if a checkpoint cannot hold it.
    """
    said = f"{setting}.name={config.name}"
    with torch.random.fork_rng(devices=[]):
        parameter = nn.Parameter(torch.ones(_PROBED_SHAPE[:ndim]))
        optimizer = _probed_optimizer(config, parameter, setting)
        before = _describe_group(optimizer)
        for number in range(_STEPS_BEFORE):
            _probe_step(optimizer, parameter, number, said)
        if (after := _describe_group(optimizer)) != before:
            changed = next(key for key in after if after[key] != before.get(key))
            raise ConfigError(
                f"{said}: its steps change `{changed}` of its parameter groups, which no "
                "checkpoint holds. Keep it in the state of each parameter, as a tensor of its "
                "shape."
            )
        state = optimizer.state[parameter]
        form, names = _read_form(state, parameter, said), set(state)
        again = nn.Parameter(parameter.detach().clone())
        resumed = _probed_optimizer(config, again, setting)
        count = form.make_step(float(state.get("step", 0)), parameter.device)
        resumed.state[again] = {name: state[name].clone() for name in form.moments} | count
        differs = False
        for number in range(_STEPS_BEFORE, _STEPS_AFTER):
            _probe_step(optimizer, parameter, number, said)
            _probe_step(resumed, again, number, said)
            differs |= not torch.equal(parameter.nan_to_num(), again.nan_to_num())
    if late := sorted(state.keys() - names):
        raise ConfigError(
            f"{said}: it remembers `{late[0]}` of a parameter only after its step {_STEPS_BEFORE}, "
            "and a checkpoint has the same of all. Begin it, with zeros, at the first step."
        )
    if differs:
        raise ConfigError(
            f"{said}: its steps depend on more than it remembers of a parameter, so a resumed run "
            "would make others. Keep all of it in the state of each parameter, as tensors of its "
            "shape and a count named `step`, and in no attribute."
        )
    return form


def _probed_optimizer(
    config: OptimizerConfig, parameter: nn.Parameter, setting: str
) -> torch.optim.Optimizer:
    group = {"params": [parameter], "weight_decay": config.weight_decay}
    return make_user_optimizer(config, [group], setting)


def _probe_step(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, number: int, said: str
) -> None:
    """Make the step of this number, with a gradient and random numbers that are its own."""
    torch.manual_seed(number)
    parameter.grad = torch.randn_like(parameter)
    try:
        optimizer.step()
    except Exception as error:
        raise ConfigError(f"{said}: its step raised {type(error).__name__}: {error}") from error


def _read_form(state: Mapping[str, Any], parameter: Tensor, said: str) -> StateForm:
    moments, step = [], ""
    for name, value in state.items():
        is_tensor = isinstance(value, Tensor)
        if is_tensor and value.shape == parameter.shape and value.is_floating_point():
            moments.append(name)
        elif name == "step" and ((is_tensor and not value.ndim) or _is_number(value)):
            step = "cpu" if is_tensor else "number"
        elif value is not None:
            raise ConfigError(
                f"{said}: of a parameter of shape {list(parameter.shape)} it remembers `{name}`, "
                f"{_describe_value(value)}, which no checkpoint could hold. Tensors of the "
                "parameter's shape and a count named `step` can be saved."
            )
    return StateForm(tuple(moments), step=step)


def _describe_group(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    group = optimizer.param_groups[0]
    return {key: repr(value) for key, value in group.items() if key != "params"}


def _describe_value(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"a tensor of shape {list(value.shape)}" if is_tensor else f"a {type(value).__name__}"
