"""The HTML reports: of a run, and of a comparison of runs."""
