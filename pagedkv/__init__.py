"""Torch-free bookkeeping of a paged KV cache."""
