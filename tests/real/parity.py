"""Greedy ids against transformers' own `generate`, up to a near tie that is listed."""

import random

#: the two best logits of a near tie are closer than this
NEAR_TIE = 5e-4

_WORDS = [
    "river",
    "mountain",
    "engine",
    "coffee",
    "music",
    "lantern",
    "window",
    "garden",
    "bicycle",
    "planet",
    "history",
    "kitchen",
    "market",
    "winter",
    "letter",
    "harbour",
    "science",
    "morning",
    "painting",
    "forest",
    "village",
    "summer",
    "ocean",
    "bridge",
    "teacher",
    "island",
    "library",
    "journey",
    "silver",
]


def chats(count, *, longest=700, seed=7):
    """`count` prompts of 5 to about `longest` tokens: a few words of raw text, then chats that grow."""
    rng = random.Random(seed)
    out = ["The capital of France is", [{"role": "user", "content": "Hi"}]]
    for i in range(2, count):
        words = int(3 + (longest - 75) * ((i - 1) / (count - 2)) ** 1.5)
        text = " ".join(rng.choice(_WORDS) for _ in range(words))
        out.append([{"role": "user", "content": f"Tell me something about this list: {text}. What stands out?"}])
    return out


def generate_on(model, prompt_ids, new):
    """transformers' greedy ids for one prompt, end tokens ignored."""
    return generate(model, prompt_ids, new, eos_token_id=-1)


def generate(model, prompt_ids, new, **options):
    """transformers' greedy ids for one prompt."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt_ids], device=model.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            do_sample=False,
            repetition_penalty=1.0,
            pad_token_id=0,
            **options,
        )
    return out[0, len(prompt_ids) :].tolist()


def gap_at(model, prompt_ids, answer, place):
    """Distance of the two best logits for the token at `place` of the answer, by a full forward."""
    import torch

    with torch.inference_mode():
        ids = torch.tensor([prompt_ids + answer[:place]], device=model.device)
        best = model(input_ids=ids).logits[0, -1].float().topk(2).values
    return float(best[0] - best[1])


def near_ties(model, prompts, ours, theirs, limit=NEAR_TIE):
    """Places where the answers part, each with its gap; raises AssertionError if one is no near tie."""
    found = []
    for number, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a == b:
            continue
        place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        gap = gap_at(model, prompt, b, place)
        assert gap < limit, f"prompt {number} parts at token {place} where the gap is {gap:.2e}: {a} {b}"
        found.append((number, place, gap))
    return found
