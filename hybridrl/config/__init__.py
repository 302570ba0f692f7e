"""Settings: the typed schema, the YAML files, and what is refused before a job starts."""
