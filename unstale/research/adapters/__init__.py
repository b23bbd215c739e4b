"""Adapters: each file turns the environments of another library into a task set."""
