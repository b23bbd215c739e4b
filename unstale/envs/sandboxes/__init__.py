"""Places where the agents of terminal tasks work, and the readers of their task folders."""
