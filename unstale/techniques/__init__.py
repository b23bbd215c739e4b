"""Techniques of the core: changes to one part of training, chosen by the option `techniques`.

`hooks` has the protocols that a technique implements, and the class `Techniques`, which calls the
chosen techniques.
"""
