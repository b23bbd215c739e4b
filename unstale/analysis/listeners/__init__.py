"""Modules that act at the end of a run. `unstale.cli.session` calls their function `run_ended`."""
