"""The embedded engine: a decoder in a child process, with a KV cache that is divided into pages."""
