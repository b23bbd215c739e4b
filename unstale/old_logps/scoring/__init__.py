"""Code that several routes (methods to compute `old_logp`) share.

Scorers compute log-probabilities of given tokens, and caches keep their results.
"""
