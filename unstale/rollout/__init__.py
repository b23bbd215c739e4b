"""Episodes: engine and environment make trajectories, a queue bounds their staleness."""
