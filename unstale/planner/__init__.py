"""Predictions of a run's throughput, staleness and memory, by formula and by simulation."""
