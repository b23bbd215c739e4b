"""The verbs of the command line, one module each. None imports torch."""
