"""Which requests enter the engine now, which wait, and which are turned away."""
