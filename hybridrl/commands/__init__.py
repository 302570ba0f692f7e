"""What the command `hybridrl` does besides planning; one file for each group of commands."""
