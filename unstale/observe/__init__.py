"""Watching a run: what it writes down, the live display, the report. Nothing here imports torch."""
