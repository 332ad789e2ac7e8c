"""transformers in a process of its own: reads one JSON object a line, answers one a line, and sleeps in between.

Run as a file, so that it imports nothing of corogen. Requests::

    {"load": FOLDER, "threads": N}                       -> {"versions": {...}}
    {"run": "batch" | "continuous" | "one", "prompts": [...], "new": N}
                                                         -> {"seconds": S, "tokens": N, "ids": [[...], ...]}

A prompt is a list of messages or a list of token ids. Only the generation is timed, not the tokenising. Decoding is
greedy and never ends before `new` tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from typing import Any


class Peer:
    """A model of transformers, in fp32, as its own documentation uses it."""

    def __init__(self, folder: str, threads: int) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(threads)
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        if self.tokenizer.pad_token_id is None:
            self.tokenizer.pad_token = self.tokenizer.eos_token
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = model.eval()

    def ids(self, prompt: Any) -> list[int]:
        """Token ids of messages; ids are taken as they are."""
        if prompt and isinstance(prompt[0], int):
            return list(prompt)
        return list(
            self.tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=True)["input_ids"]
        )

    def run(self, kind: str, prompts: list[Any], new: int) -> dict[str, Any]:
        """Generate `new` tokens for every prompt, and time it."""
        import torch

        ids = [self.ids(prompt) for prompt in prompts]
        start = time.perf_counter()
        with torch.inference_mode():
            out = self._continuous(ids, new) if kind == "continuous" else self._static(ids, new)
        return {"seconds": time.perf_counter() - start, "tokens": sum(map(len, out)), "ids": out}

    def _static(self, ids: list[list[int]], new: int) -> list[list[int]]:
        batch = self.tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        out = self.model.generate(**batch, max_new_tokens=new, min_new_tokens=new, do_sample=False)
        tokens: list[list[int]] = out[:, batch["input_ids"].shape[1] :].tolist()
        return tokens

    def _continuous(self, ids: list[list[int]], new: int) -> list[list[int]]:
        import transformers

        make: Any = transformers.GenerationConfig
        config = make(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=self.tokenizer.pad_token_id)
        out = self.model.generate_batch(inputs=ids, generation_config=config)
        return [list(answer.generated_tokens) for answer in out.values()]


def _answer(state: dict[str, Peer], request: dict[str, Any]) -> dict[str, Any]:
    if "load" in request:
        if not os.path.isdir(request["load"]):
            raise NotADirectoryError(request["load"])
        import torch
        import transformers

        state["peer"] = Peer(request["load"], request["threads"])
        return {"versions": {"torch": torch.__version__, "transformers": transformers.__version__}}
    return state["peer"].run(request["run"], request["prompts"], request["new"])


def main() -> None:
    """Serve until stdin is closed. Whatever libraries print goes to stderr."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    state: dict[str, Peer] = {}
    for line in sys.stdin:
        try:
            reply = _answer(state, json.loads(line))
        except Exception:
            reply = {"error": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
