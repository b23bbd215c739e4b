"""How the shipped base policy is made: `python -m tools.base_policy` (see `make.py`).

Not a recipe of a run: it is what the retail recipe's run begins from. Needs torch, so nothing imports it by the way.
"""
