"""A sandbox for Python programs that a model wrote, and for tests of them; see docs/sandbox.md."""

from hybridrl.sandbox.python_runner import Limits, Outcome, confinement, judge_program, run_python

__all__ = ["Limits", "Outcome", "confinement", "judge_program", "run_python"]
