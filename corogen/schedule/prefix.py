"""Names for the contents of full blocks, so that equal beginnings of prompts are found."""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Sequence


class PrefixHasher:
    """Chained, keyed hashes: a block's key covers its tokens and everything before them.

    The key is secret and new in every process, so that nobody can craft a prompt that collides with another's;
    `salt` keeps apart what must never share blocks.
    """

    def __init__(self, block_size: int, *, salt: bytes = b"", secret: bytes | None = None) -> None:
        self.block_size = block_size
        self._secret = secret if secret is not None else secrets.token_bytes(32)
        self._root = hashlib.blake2b(salt, key=self._secret, digest_size=16).digest()

    def extend(self, keys: list[bytes], tokens: Sequence[int], count: int) -> list[bytes]:
        """Append to `keys` until it holds `count` keys, those of the first `count` blocks of `tokens`."""
        size = self.block_size
        for i in range(len(keys), count):
            parent = keys[i - 1] if i else self._root
            block = array("Q", tokens[i * size : (i + 1) * size]).tobytes()
            keys.append(hashlib.blake2b(parent + block, key=self._secret, digest_size=16).digest())
        return keys
