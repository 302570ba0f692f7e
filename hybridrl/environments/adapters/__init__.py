"""Adapters: each lets one kind of environment play episodes with the model.

`environment_program` loads them in the Python of the environment, where HybridRL need not be
installed, so they import only each other and what such an environment brings. An adapter
is a file with a class `Adapter`, whose base class is in `environment_adapter`.
"""
