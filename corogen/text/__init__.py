"""Text in and out of token ids: tokenizer, chat templates, incremental decoding, stop strings. No torch here."""
