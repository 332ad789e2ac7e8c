"""From logits to the next token, one row a sequence."""
