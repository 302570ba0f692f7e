"""Driver programs: the dataflow of each algorithm, one per file, and the loop around them.

`trainer.name=<module>` runs `hybridrl.trainers.<module>.Trainer`, so a new algorithm is a new file.
"""

import importlib

PARTS = ("adaptive_kl", "base", "evaluation", "loop", "shaping", "step_metrics", "warmup")
"""Modules here that are not driver programs."""


def load_trainer(name: str) -> type:
    """The driver program called `name`."""
    return importlib.import_module(f"{__name__}.{name}").Trainer
