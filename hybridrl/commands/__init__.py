"""The subcommands of `hybridrl`: options, calls and printed tables, one file a command."""
