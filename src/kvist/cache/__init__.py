"""Blocks, identities, the prefix tree, leases and eviction: the KV cache in plain integers. Never imports torch."""
