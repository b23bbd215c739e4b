"""An optional package that shows and explains runs: dashboard, report, advice and planner.

The core of `unstale` never imports it. `unstale.config.plugins` finds its commands.
"""
