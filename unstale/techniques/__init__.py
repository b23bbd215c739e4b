"""Techniques of the core: changes to one part of training, chosen by the option `techniques`.

`hooks` has the protocols that a technique implements, says who calls them, and has the class
`Techniques` of the chosen ones.
"""
