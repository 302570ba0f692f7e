"""A sandbox for Python programs that a model wrote, and for tests of them; see docs/sandbox.md."""
