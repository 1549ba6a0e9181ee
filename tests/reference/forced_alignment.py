"""Where a CTC model hears given tokens: the best path over blank and tokens, in float64.

Dynamic programming over the extended labels (blank, token, blank, ...), as in Graves et al.,
"Connectionist temporal classification", 2006, with max in place of sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


def first_frames(
    log_probs_TV: npt.NDArray[np.float64], tokens: Sequence[int], blank: int = 0
) -> list[int]:
    """The first frame that the best path gives to each token."""
    labels = np.full(2 * len(tokens) + 1, blank)
    labels[1::2] = tokens
    emit_TL = log_probs_TV.astype(np.float64)[:, labels]
    may_skip_L = np.zeros(len(labels), dtype=bool)
    may_skip_L[2:] = (labels[2:] != blank) & (labels[2:] != labels[:-2])
    score_L = np.full(len(labels), -np.inf)
    score_L[:2] = emit_TL[0, :2]
    steps_TL = np.zeros(emit_TL.shape, dtype=np.int64)
    for frame in range(1, len(emit_TL)):
        reached_3L = np.full((3, len(labels)), -np.inf)
        reached_3L[0] = score_L
        reached_3L[1, 1:] = score_L[:-1]
        reached_3L[2, 2:] = np.where(may_skip_L[2:], score_L[:-2], -np.inf)
        steps_TL[frame] = reached_3L.argmax(0)
        score_L = reached_3L.max(0) + emit_TL[frame]
    return _starts(steps_TL, last=int(np.argmax(score_L[-2:])) + max(0, len(labels) - 2))


def _starts(steps_TL: npt.NDArray[np.int64], *, last: int) -> list[int]:
    path = [last]
    for steps_L in steps_TL[:0:-1]:
        path.append(path[-1] - int(steps_L[path[-1]]))
    path.reverse()
    return [path.index(label) for label in range(1, steps_TL.shape[1], 2)]
