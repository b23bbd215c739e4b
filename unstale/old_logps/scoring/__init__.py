"""Code that routes share: scorers, which compute log-probabilities, and caches of their results."""
