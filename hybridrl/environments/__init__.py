"""External environments in processes of their own; each plays episodes by calling the model over
HTTP and returns their scores.

`environment_pool.EnvironmentPool` runs them, `environment_program` is the program of such a
process, which needs nothing but Python's standard library, and `adapters` are what it loads: one
for each kind of environment.
"""
