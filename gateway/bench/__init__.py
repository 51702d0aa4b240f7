"""Measurements of the gateway that its users can make: the simulation over a request log."""
