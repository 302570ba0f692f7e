"""Checks of settings, data, models, machine and folders, all before a job starts."""
