"""Objectives: losses of a token that depend on the staleness ratio S = pi / pi_old.

Each module of this package registers objectives, and can be imported without torch. Another file
may register one, too: `config.objectives.ObjectiveConfig` lists what it must declare. The formulas
of the objectives in this package are functions of tensors in `algorithms.objectives`.
"""
