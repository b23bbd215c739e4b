"""Listeners to a run: each module has a function `run_ended`, which `unstale.cli.session` calls."""
