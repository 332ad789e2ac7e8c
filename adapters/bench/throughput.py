"""Many requests at once, or one alone, through a real model: tokens a second and how evenly they come.

With a peer both sides take turns, A B A B ..., in one run on one machine: each is idle while the other is measured,
and what counts is the ratio within a pair, so that a machine that slows down for a while slows down both.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench import machine
from corogen.adapters.bench.figures import spread, stream_figures
from corogen.adapters.bench.peer import PeerError, PeerProcess
from corogen.adapters.bench.workload import Round, stream_all
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

Say = Callable[[str], None]


class PeerRun(NamedTuple):
    """What is compared with: where the peer finds the model, and how it generates (`peer.KINDS`)."""

    folder: Path
    kind: str
    threads: int


class PeerRound(NamedTuple):
    """One go of the peer's."""

    seconds: float
    ids: list[list[int]]
    #: CPU seconds of our worker processes while it ran: what it had to share the machine with
    our_cpu: float

    @property
    def rate(self) -> float:
        """Generated tokens a second, prefill included."""
        return sum(map(len, self.ids)) / self.seconds


def measure(
    pipe: Pipeline,
    prompts: Sequence[Any],
    *,
    output_len: int,
    ignore_eos: bool = True,
    repeat: int = 5,
    peer: PeerRun | None = None,
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure `repeat` rounds (pairs, with a peer) after a warm-up of both sides; returns a JSON-ready result.

    Args:
        ignore_eos: every answer has exactly `output_len` tokens; needed with a peer.
        say: told one line about each round.

    Raises:
        CorogenError: a request failed, or the peer did.
    """
    config = GenerationConfig(max_new_tokens=output_len, ignore_eos=ignore_eos)

    def ours() -> Round:
        return asyncio.run(stream_all(pipe, prompts, config))

    say("warm-up")
    ours()
    if peer is None:
        rounds = []
        for i in range(repeat):
            rounds.append(ours())
            say(f"round {i + 1} of {repeat}: {rounds[-1].rate:.1f} tok/s")
        return _result(rounds, len(prompts), output_len)
    with PeerProcess(peer.folder, peer.threads) as process:
        return _measure_pairs(ours, process, peer, list(prompts), output_len, repeat, say)


def _measure_pairs(
    ours: Callable[[], Round],
    process: PeerProcess,
    peer: PeerRun,
    prompts: list[Any],
    output_len: int,
    repeat: int,
    say: Say,
) -> dict[str, Any]:
    _peer_round(process, peer.kind, prompts, output_len)
    rounds: list[Round] = []
    theirs: list[PeerRound] = []
    idle_cpu = []
    for i in range(repeat):
        before = machine.cpu_seconds(process.pid) or 0.0
        rounds.append(ours())
        idle_cpu.append((machine.cpu_seconds(process.pid) or 0.0) - before)
        theirs.append(_peer_round(process, peer.kind, prompts, output_len))
        a, b = rounds[-1].rate, theirs[-1].rate
        say(f"pair {i + 1} of {repeat}: corogen {a:.1f}, transformers {b:.1f} tok/s, ratio {a / b:.3f}")
    result = _result(rounds, len(prompts), output_len)
    result["peer"] = {
        "name": "transformers",
        "kind": peer.kind,
        "threads": peer.threads,
        "versions": process.versions,
        "tok_per_s": spread([run.rate for run in theirs]),
        "peer_cpu_s_while_ours_ran": max(idle_cpu),
        "our_cpu_s_while_peer_ran": max(run.our_cpu for run in theirs),
        "same_token_share": _agreement(rounds[-1].ids, theirs[-1].ids),
    }
    result["ratio"] = spread([mine.rate / run.rate for mine, run in zip(rounds, theirs, strict=True)])
    return result


def _peer_round(process: PeerProcess, kind: str, prompts: list[Any], output_len: int) -> PeerRound:
    workers = [pid for pid in machine.children() if pid != process.pid]
    before = [machine.cpu_seconds(pid) or 0.0 for pid in workers]
    reply = process.run(kind, prompts, output_len)
    if reply["tokens"] != len(prompts) * output_len:
        raise PeerError(f"transformers gave {reply['tokens']} tokens instead of {len(prompts)} times {output_len}")
    used = [(machine.cpu_seconds(pid) or 0.0) - b for pid, b in zip(workers, before, strict=True)]
    return PeerRound(reply["seconds"], reply["ids"], sum(used))


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first difference of each answer: 1 when both did the very same work."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / total if total else 1.0


def _result(rounds: list[Round], requests: int, output_len: int) -> dict[str, Any]:
    return {
        "requests": requests,
        "output_len": output_len,
        "rounds": len(rounds),
        "tokens_per_round": statistics.median(run.tokens for run in rounds),
        "tok_per_s": spread([run.rate for run in rounds]),
        **stream_figures(line for run in rounds for line in run.lines),
    }
