"""Make the shipped policies, from which recipes of the service desks start."""
