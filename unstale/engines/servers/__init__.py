"""Engines that are servers behind HTTP: vLLM and SGLang."""
