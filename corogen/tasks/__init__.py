"""Any torch module behind one call: submit, batch, forward, split."""
