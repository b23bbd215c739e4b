"""The model in training: loading it, packed forward passes, log-probabilities of tokens, and
LoRA.
"""
