"""Reinforcement learning of policies that draw an object in steps: diffusion and masked diffusion.

A step takes the place of a token. Everything else is that of the package: groups, forks,
advantages, the queue that bounds staleness, and the three log-probabilities of each step.
"""
