"""Pieces for tests: executors without a model, scripted answers, tiny models and tokenizers."""

from corogen.testing.fake import FakeExecutor

__all__ = ["FakeExecutor"]
