"""The embedded engine: a decoder in a child process, with a KV cache that is divided into pages.

New weights arrive by three requests of `engine`: interrupt, load and resume. `worker` handles them
between two steps of decoding, and `batcher` drops the cache unless it keeps old ones.
"""
