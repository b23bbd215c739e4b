"""Techniques of the core: changes to one part of training, chosen by the option `techniques`.

`hooks` has the protocols that techniques implement, describes who calls them, and has the class
`Techniques`, which holds the chosen ones.
"""
