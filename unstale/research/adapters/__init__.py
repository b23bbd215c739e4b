"""Adapters: each file makes the environments of another library usable as a task set."""
