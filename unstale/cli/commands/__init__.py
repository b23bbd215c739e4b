"""The verbs of the command line, one module each: `add` adds the verb to a parser. None imports torch."""
