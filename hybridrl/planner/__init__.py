"""Planner: what a job will take of each device, in memory and in time, before it starts."""
