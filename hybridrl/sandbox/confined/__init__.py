"""The code of the sandbox's child process, which `hybridrl.sandbox.python_runner` starts.

The child is a bare interpreter that starts once per program, so these modules import nothing of
HybridRL and as little of the standard library as they can: every import is paid for per program.
"""
