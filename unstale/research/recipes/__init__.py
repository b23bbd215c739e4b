"""Recipes with environments or techniques of the package `unstale.research`."""
