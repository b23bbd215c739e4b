"""`unstale plan`."""

from unstale.planner.plan_command import add as add
