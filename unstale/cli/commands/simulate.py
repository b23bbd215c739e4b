"""`unstale simulate`."""

from unstale.planner.simulate_command import add as add
