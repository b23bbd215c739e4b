"""Weights of several versions: storage, compression, and publication to the engines."""
