"""One thing of every kind that a package can add to unstale, each in one module."""
