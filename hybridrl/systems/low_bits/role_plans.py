"""Roles that compute some layers with fewer bits, and the notices about them."""

from __future__ import annotations

from collections.abc import Iterable

from hybridrl.config.role_models import parse_role_model
from hybridrl.config.schema import Config
from hybridrl.systems.low_bits.precision_plan import PrecisionPlan


def find_precision_setting(config: Config, role: str) -> tuple[str, str] | None:
    """Return the setting that names a role's precision plan, and the file; None if it has none."""
    path = parse_role_model(config, role).precision
    return None if path is None else (f"models.{role}.precision", path)


def load_precision_plan(config: Config, role: str) -> PrecisionPlan | None:
    """Load the precision plan of a role; None if it has none.

    Raises:
        ConfigError: if the file holds none.
    """
    found = find_precision_setting(config, role)
    return None if found is None else PrecisionPlan.load(found[1], found[0])


def list_precision_notices(config: Config, roles: Iterable[str]) -> list[str]:
    """Return a notice for each role that computes with fewer bits."""
    found = []
    for role in roles:
        if (plan := load_precision_plan(config, role)) is None:
            continue
        setting, _ = find_precision_setting(config, role) or ("", "")
        low = plan.low_layers
        kls = plan.found.get("token_kl")
        # People may have written there what they like.
        measured = [kl for kl in kls if isinstance(kl, float)] if isinstance(kls, list) else []
        said = f"; measured, that changed {max(measured):.2g} nats a token" if measured else ""
        found.append(
            f"{setting}: {role} computes {len(low)} of {plan.layers} layers in fewer bits"
            f"{'' if len(plan.ranks) == 1 else ' on some ranks'} "
            f"({', '.join(map(str, low)) or 'none'}){said}."
        )
    return found
