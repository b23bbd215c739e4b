"""An optional package that shows and explains runs: dashboard, report, advice and planner.

The core, which is all packages but `unstale.analysis` and `unstale.research`, never imports it.
`unstale.config.plugins` finds its commands.
"""
