"""Optional commands that show and explain runs: dashboard, report, advice and planner.

The core of `unstale` never imports this package. `unstale.config.plugins` finds its commands.
"""
