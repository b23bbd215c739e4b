"""Processes of a run on other machines. Only this package imports ray."""
