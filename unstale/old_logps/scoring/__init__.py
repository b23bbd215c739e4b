"""Code that several ways to get `old_logp` share.

Scorers compute log-probabilities, and caches keep their results.
"""
