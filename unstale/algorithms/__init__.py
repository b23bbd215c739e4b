"""The mathematics of training as pure functions: advantages, corrections, objectives, audit.

The functions take tensors or records, need no other part of this package, and can be used in any
trainer.
"""
