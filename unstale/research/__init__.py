"""Optional parts for experiments: techniques, environments, and comparisons of runs.

The core of the package never imports them. `unstale.config.plugins` finds them by name.
"""
