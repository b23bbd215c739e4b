"""The embedded engine: a decoder in a child process, with a KV cache that is divided into pages.

`engine` sends new weights by three requests: interrupt, load and resume. `worker` handles them in
the child process between two decoding steps. `batcher` drops the cache after a load, unless it is
set to keep it.
"""
