"""Composition of a `Config` from presets, recipes and overrides; secrets in it."""
