"""Evaluation: prompt sets, metrics of their responses, confidence intervals, and comparison with a
baseline."""
