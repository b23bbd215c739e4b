"""The reports of comparisons and studies, and the sentences that all reports share.

The report of a run is its page of the dashboard in one file (`unstale.analysis.dashboard.frozen`).
"""
