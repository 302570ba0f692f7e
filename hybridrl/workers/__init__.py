"""The multi-controller programs: what a role does on each of its devices."""
