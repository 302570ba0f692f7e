"""What runs inside the sandbox's child process; `hybridrl.sandbox.python_runner` is the way in.

The child is a bare interpreter that starts once per program, so these modules import nothing of
HybridRL and as little of the standard library as they can: every import is paid for per program.
"""
