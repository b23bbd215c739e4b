"""Objectives: losses of a token that depend on the staleness ratio S = pi / pi_old.

Each module of this package registers objectives, and can be imported without torch. Another file
may register one, too: `config.objectives.ObjectiveConfig` has all that it declares. The formulas of
the shipped ones are functions of tensors in `algorithms.objectives`.
"""
