"""A sandbox for Python programs that a model wrote, and for tests of them; see docs/sandbox.md."""

from hybridrl.sandbox.python_runner import (
    SandboxLimits,
    SandboxResult,
    find_confinement,
    judge_program,
    run_python,
)

__all__ = ["SandboxLimits", "SandboxResult", "find_confinement", "judge_program", "run_python"]
