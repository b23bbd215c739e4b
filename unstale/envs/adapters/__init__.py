"""Task sets of other libraries."""
