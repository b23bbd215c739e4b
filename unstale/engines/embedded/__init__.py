"""The embedded engine: a paged decoder in a child process."""
