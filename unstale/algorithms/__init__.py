"""Advantages, corrections, objectives, old-policy approximations and audit: pure functions."""
