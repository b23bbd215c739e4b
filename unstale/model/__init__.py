"""The trained model: loading, packed forward passes, log-probabilities of tokens, LoRA."""
