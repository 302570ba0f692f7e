"""Settings: the typed schema, the YAML files, and how both become a configuration."""
