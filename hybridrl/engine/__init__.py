"""Engines for training: forward, backward and optimizer, and the hybrid of training and
generation."""
