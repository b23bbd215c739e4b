"""Weights of several versions: their storage, compression, and publication to the engines."""
