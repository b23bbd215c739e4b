"""Commands of the annex: each module has a function `add`, as `unstale.cli.verbs.command` makes."""
