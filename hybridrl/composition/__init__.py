"""From a command line to a `Config`: presets, recipes, overrides, earlier models, and secrets."""
