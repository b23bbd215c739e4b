"""Commands for experiments. Each module has a function `add`, made by
`unstale.cli.verbs.command`.
"""
