"""An annex that shows and explains runs: dashboard and report, advice, and the planner.

The core never imports it. `unstale.config.plugins` finds its commands.
"""
