"""One worker: an engine in a thread, shards in, parts out."""
