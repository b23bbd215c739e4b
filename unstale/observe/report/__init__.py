"""The HTML report of a run and of a comparison."""
