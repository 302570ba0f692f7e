"""Bringing weights from the trainer's layout to the generator's: plans executed by one of several
transports."""
