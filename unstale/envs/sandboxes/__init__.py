"""Sandboxes in which agents work on terminal tasks, and readers of folders with such tasks."""
