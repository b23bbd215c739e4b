"""Fuzz tests of readers of untrusted input, guided by coverage (atheris) or drawn by hypothesis."""
