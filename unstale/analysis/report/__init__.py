"""The report of a comparison, and the words of all reports.

The report of a run is a frozen page of the dashboard (`unstale.analysis.dashboard.frozen`).
"""
