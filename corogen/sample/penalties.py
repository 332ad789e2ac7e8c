"""What tokens a sequence has had, for the sequences whose settings ask for it, and what that does to its logits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from corogen.wire.messages import Sampling


def counts_tokens(sampling: Sampling) -> bool:
    """Whether these settings need to know which tokens came before."""
    return sampling.repetition_penalty != 1.0 or sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0


class TokenCounts:
    """[vocabulary] tables of one sequence."""

    def __init__(self, prompt_len: int, vocab_size: int, device: torch.device) -> None:
        self._prompt_len = prompt_len
        self._seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
        self._answer = torch.zeros(vocab_size, dtype=torch.float32, device=device)

    def add(self, token_ids: Sequence[int], start: int) -> None:
        """Tokens at positions `start` onwards; those from the prompt's end on belong to the answer."""
        split = max(0, self._prompt_len - start)
        self._add(token_ids, token_ids[split:])

    def _add(self, seen: Iterable[int], answer: Iterable[int]) -> None:
        self._seen.index_fill_(0, self._tensor(seen), True)
        self.add_sampled(self._tensor(answer))

    def _tensor(self, ids: Iterable[int]) -> torch.Tensor:
        """To the device without waiting for it."""
        host = torch.tensor(list(ids), dtype=torch.long)
        return host if self._seen.device.type == "cpu" else host.pin_memory().to(self._seen.device, non_blocking=True)

    def add_sampled(self, token_ids: torch.Tensor) -> None:
        """Ids [n] of the answer that are on the device already."""
        self._seen.index_fill_(0, token_ids, True)
        self._answer.index_add_(0, token_ids, torch.ones_like(token_ids, dtype=torch.float32))

    def apply(self, logits: torch.Tensor, sampling: Sampling) -> None:
        """Change one row of logits [vocabulary] in place."""
        if sampling.repetition_penalty != 1.0:
            p = sampling.repetition_penalty
            logits.copy_(torch.where(self._seen, torch.where(logits < 0, logits * p, logits / p), logits))
        if sampling.frequency_penalty:
            logits.sub_(self._answer * sampling.frequency_penalty)
        if sampling.presence_penalty:
            logits.sub_((self._answer > 0) * sampling.presence_penalty)
