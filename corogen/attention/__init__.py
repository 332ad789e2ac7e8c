"""Attention over a paged KV cache, plugged into unmodified transformers models."""
