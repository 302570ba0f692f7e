"""Executing a plan: tensors from one layout to another, by one transport or another."""
