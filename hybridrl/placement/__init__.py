"""Placement strategies: `place(roles, cluster)` gives each role its devices, in rank order."""

from hybridrl.placement import flattening

STRATEGIES = {"flattening": flattening.place}
"""By the name that `placement=` takes."""
