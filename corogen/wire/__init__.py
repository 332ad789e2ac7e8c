"""Messages and channels between the engine and its workers."""
