"""`unstale simulate` and `unstale plan`: see unstale/planner."""

from unstale.planner.simulate_command import add as add
