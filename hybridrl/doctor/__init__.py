"""Checks of a machine and its packages for `hybridrl doctor`, one family a file.

Nothing here imports torch, transformers, vLLM or Ray into this process: they may be what is broken.
"""
