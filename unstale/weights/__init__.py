"""Weights of several versions: how they are stored, compressed and published to the engines."""
