"""Random numbers that depend on (seed, position) and on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

_MASK = 2**64 - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits, the same on every machine.

    SplitMix64's output function (Steele, Lea and Flood 2014), once over the seed and once over the position, so that
    neighbouring seeds and positions have nothing in common.
    """
    return (_mix(_mix(seed) ^ _mix(~position)) >> 11) * 2.0**-53


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """The same numbers for many pairs at once, float64."""
    keys = np.array([s & _MASK for s in seeds], np.uint64), ~np.array(positions, np.uint64)
    mixed = _mix_all(_mix_all(keys[0]) ^ _mix_all(keys[1]))
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix_all(value: np.ndarray) -> np.ndarray:
    z = value + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def _mix(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
