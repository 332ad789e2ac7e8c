"""Many requests at once, or one alone, through a real model: tokens a second and how evenly they come.

With a peer both sides take turns, A B A B ..., in one run on one machine: each is idle while the other is measured,
and what counts is the ratio within a pair, so that a machine that slows down for a while slows down both.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from corogen.adapters.bench import machine
from corogen.adapters.bench.figures import spread, stream_figures
from corogen.adapters.bench.peer import PeerError, PeerProcess
from corogen.adapters.bench.workload import PromptSource, Round, stream_all
from corogen.params import GenerationConfig

if TYPE_CHECKING:
    from corogen.adapters.pipeline import Pipeline

Say = Callable[[str], None]


class PeerRun(NamedTuple):
    """What is compared with: where the peer finds the model, and how it generates (`peer.KINDS`)."""

    folder: Path
    kind: str
    threads: int


class Use(NamedTuple):
    """CPU seconds that both sides used in one round, of whichever side."""

    #: this process and its workers
    ours: float
    #: the process of transformers
    peer: float


class Pair(NamedTuple):
    """One round of ours, then one of the peer's."""

    mine: Round
    use: Use
    peer_seconds: float
    peer_ids: list[list[int]]
    peer_use: Use

    @property
    def peer_rate(self) -> float:
        """The peer's generated tokens a second, prefill included."""
        return sum(map(len, self.peer_ids)) / self.peer_seconds

    @property
    def ratio(self) -> float:
        """How many times as fast we were."""
        return self.mine.rate / self.peer_rate


class Meter:
    """Reads the CPU clocks of both sides."""

    def __init__(self, peer_pid: int) -> None:
        self._peer = peer_pid
        self._ours = [None, *(pid for pid in machine.children() if pid != peer_pid)]

    def read(self) -> Use:
        """CPU seconds so far."""
        return Use(sum(machine.cpu_seconds(pid) or 0.0 for pid in self._ours), machine.cpu_seconds(self._peer) or 0.0)

    def since(self, before: Use) -> Use:
        """CPU seconds since `before`."""
        now = self.read()
        return Use(now.ours - before.ours, now.peer - before.peer)


def measure(
    pipe: Pipeline,
    prompts: PromptSource,
    *,
    output_len: int,
    ignore_eos: bool = True,
    repeat: int = 5,
    peer: PeerRun | None = None,
    sampling: Mapping[str, Any] = MappingProxyType({}),
    say: Say = lambda line: None,
) -> dict[str, Any]:
    """Measure `repeat` rounds (pairs, with a peer) after a warm-up of both sides; returns a JSON-ready result.

    Args:
        ignore_eos: every answer has exactly `output_len` tokens; needed with a peer.
        prompts: gives the prompts of a round; round 0 is the warm-up.
        sampling: further fields of GenerationConfig.
        say: told one line about each round.

    Raises:
        CorogenError: a request failed, or the peer did.
    """
    config = GenerationConfig(max_new_tokens=output_len, ignore_eos=ignore_eos, **sampling)

    def ours(round_number: int) -> Round:
        return asyncio.run(stream_all(pipe, prompts(round_number), config))

    say("warm-up")
    ours(0)
    if peer is None:
        rounds = []
        for i in range(repeat):
            rounds.append(ours(i + 1))
            say(f"round {i + 1} of {repeat}: {rounds[-1].rate:.1f} tok/s")
        return _result(rounds, output_len)
    with PeerProcess(peer.folder, peer.threads) as process:
        return _measure_pairs(ours, process, peer, prompts, output_len, repeat, say)


def _measure_pairs(
    ours: Callable[[int], Round],
    process: PeerProcess,
    peer: PeerRun,
    prompts: PromptSource,
    output_len: int,
    repeat: int,
    say: Say,
) -> dict[str, Any]:
    def theirs(round_number: int) -> dict[str, Any]:
        asked = prompts(round_number)
        reply = process.run(peer.kind, asked, output_len)
        if reply["tokens"] != len(asked) * output_len:
            raise PeerError(f"transformers gave {reply['tokens']} tokens instead of {len(asked)} times {output_len}")
        return reply

    theirs(0)  # warm-up
    meter = Meter(process.pid)
    pairs: list[Pair] = []
    for i in range(repeat):
        pair = _pair(i + 1, ours, theirs, meter)
        pairs.append(pair)
        rates = f"corogen {pair.mine.rate:.1f}, transformers {pair.peer_rate:.1f} tok/s"
        say(f"pair {i + 1} of {repeat}: {rates}, ratio {pair.ratio:.3f}")
    result = _result([pair.mine for pair in pairs], output_len)
    result["ratio"] = spread([pair.ratio for pair in pairs])
    result["cores_used"] = [pair.use.ours / pair.mine.seconds for pair in pairs]
    result["peer"] = {"name": "transformers", **peer._asdict(), "versions": process.versions, **_peer_figures(pairs)}
    result["peer"]["folder"] = str(peer.folder)
    return result


def _pair(
    round_number: int, ours: Callable[[int], Round], theirs: Callable[[int], dict[str, Any]], meter: Meter
) -> Pair:
    before = meter.read()
    mine = ours(round_number)
    use, before = meter.since(before), meter.read()
    reply = theirs(round_number)
    return Pair(mine, use, reply["seconds"], reply["ids"], meter.since(before))


def _peer_figures(pairs: list[Pair]) -> dict[str, Any]:
    """`cores_used` far below the threads says that somebody else was on the machine in that round."""
    return {
        "tok_per_s": spread([pair.peer_rate for pair in pairs]),
        "cores_used": [pair.peer_use.peer / pair.peer_seconds for pair in pairs],
        "peer_cpu_s_while_ours_ran": max(pair.use.peer for pair in pairs),
        "our_cpu_s_while_peer_ran": max(pair.peer_use.ours for pair in pairs),
        "same_token_share": _agreement(pairs[-1].mine.ids, pairs[-1].peer_ids),
    }


def _agreement(ours: list[list[int]], theirs: list[list[int]]) -> float:
    """Share of tokens before the first difference of each answer: 1 when both did the very same work."""
    same = total = 0
    for a, b in zip(ours, theirs, strict=True):
        total += len(b)
        same += next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return same / total if total else 1.0


def _result(rounds: list[Round], output_len: int) -> dict[str, Any]:
    return {
        "requests": len(rounds[0].lines),
        "output_len": output_len,
        "rounds": len(rounds),
        "tokens_per_round": statistics.median(run.tokens for run in rounds),
        "tok_per_s": spread([run.rate for run in rounds]),
        **stream_figures(line for run in rounds for line in run.lines),
    }
