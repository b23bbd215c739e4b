"""A service with the interface of Tinker: clients train adapters and sample from them over HTTP."""
