"""Commands of `unstale.analysis`. Each module has a function `add`, which adds a command."""
