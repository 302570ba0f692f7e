"""Evaluations: sets of prompts, what is measured of answers to them, and how sure that is."""
