"""An annex for experiments: techniques, environments, and comparisons of runs.

The core never imports it. `unstale.config.plugins` finds what it adds.
"""
