"""Builds a job of a configuration: settings settled, rows loaded, devices and workers in place."""
