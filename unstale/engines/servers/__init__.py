"""Engines behind HTTP: vLLM and SGLang."""
