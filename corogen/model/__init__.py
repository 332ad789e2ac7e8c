"""Models: names and files, transformers classes, weights, fused and packed linears. Only `hf` knows transformers."""
