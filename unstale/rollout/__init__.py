"""Episodes: an engine and an environment produce trajectories, a queue bounds their staleness."""
