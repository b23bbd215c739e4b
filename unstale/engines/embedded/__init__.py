"""The embedded engine: a paged decoder in a process of its own."""
