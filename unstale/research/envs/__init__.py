"""Environments for experiments: service desks beyond retail, and those of other libraries."""
