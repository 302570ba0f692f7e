"""The settings of a job: schema, presets, and how both become a `Config`."""
