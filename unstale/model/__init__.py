"""The model: loading, packed forward passes, the log-probability head, LoRA."""
