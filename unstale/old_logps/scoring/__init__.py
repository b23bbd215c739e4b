"""Scorers, and caches of what they return."""
