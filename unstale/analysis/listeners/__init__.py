"""Modules that act when a run ends. `unstale.cli.session` calls the function `run_ended` of
each.
"""
