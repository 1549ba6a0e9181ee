"""Bounds that follow from rounding alone, whatever the processor and the order of its additions.

Higham, "Accuracy and Stability of Numerical Algorithms", chapter 3: after n roundings a result is
off by at most gamma(n) times the sum of the magnitudes that went into it, in any order of the
additions and with fused multiplications or without. Higham and Mary, "A New Approach to
Probabilistic Rounding Error Analysis", 2019: roundings go up as often as down, so that their sum
grows by the square root of n.
"""

from __future__ import annotations

#: Half a unit in the last place of 1.0.
UNIT32 = 2.0**-24
UNIT64 = 2.0**-53
#: In standard deviations. Of a thousand million sums two go beyond.
CONFIDENCE = 6.0


def gamma(num_roundings: float, unit: float = UNIT32) -> float:
    """The relative bound after `num_roundings`; they must be far fewer than 1 / unit."""
    loss = num_roundings * unit
    assert loss < 0.5, f"{num_roundings} roundings of {unit} leave no digit"
    return loss / (1.0 - loss)


#: Between two ways through a small float64 network, whose values are of size 10 at most: each takes
#: less than a million roundings. A frame too many or too few shows in the first digits.
FLOAT64_NETWORK = 2 * gamma(1e6, UNIT64) * 10.0


def log_softmax_bound(num_units: int, largest: float) -> float:
    """Of a float32 log-softmax over `num_units` scores of at most that magnitude.

    The sum is relative to its own size; exp, log and the two subtractions add a few units each.
    """
    return gamma(num_units + 10) * (1.0 + largest)


def ctc_score_bound(num_frames: int, score: float) -> float:
    """Between two float64 searches that give one hypothesis the same `score`.

    A frame costs each of them an addition and two log-add-exps, of at most 2 units each and with
    two additions around them. On the way no value is larger than the score and 1 a frame.
    """
    return 2 * gamma(10 * num_frames, UNIT64) * (abs(score) + num_frames)
