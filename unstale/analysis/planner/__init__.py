"""Predict the throughput, staleness and memory of a run, by formulas and by simulation."""
