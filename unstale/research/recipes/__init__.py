"""Recipes with environments or techniques of this annex."""
