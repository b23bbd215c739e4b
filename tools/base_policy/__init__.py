"""Make the shipped base policy, from which the retail recipe starts."""
