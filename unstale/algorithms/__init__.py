"""Advantages, corrections, objectives, proximal approximations and audit figures: pure functions of tensors."""
