"""Code that several routes (methods to compute `old_logp`) share.

Scorers compute log-probabilities, and caches keep their results.
"""
