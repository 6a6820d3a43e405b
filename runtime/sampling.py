"""Chooses the next token from a row of logits.

The steps and their order are llama.cpp's: bias, penalties, top-k, top-p, min-p, temperature. So top-p and
min-p look at the model's own probabilities, and the temperature changes only how the remaining tokens are
weighed. No step sorts the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real

import numpy as np
from numpy.typing import NDArray

from zllmc.zllm_ir.errors import ZllmcError

MAX_TEMPERATURE = 100.0


class SamplingError(ZllmcError):
    """A sampling parameter out of its range, or logits that leave nothing to choose."""


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens. A step is off at: top_k 0, top_p 1, min_p 0, repeat_penalty 1, the others 0.

    `temperature` 0 is greedy: the largest logit after bias and penalties. `top_k` keeps the k largest logits.
    `top_p` (Holtzman et al. 2020) keeps the smallest set of likeliest tokens with at least this mass.
    `min_p` (Nguyen et al. 2024) keeps tokens at least this fraction as likely as the likeliest. The penalties
    look at the last `penalty_window` tokens, prompt included: `repeat_penalty` (Keskar et al. 2019) divides
    positive logits and multiplies negative ones, `presence_penalty` is subtracted from tokens that occur,
    `frequency_penalty` once for each time. `logit_bias` is added to the logits of the given tokens; −inf
    forbids one. Raises SamplingError for values out of range.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 64
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranges = {
            "temperature": (0.0, MAX_TEMPERATURE),
            "top_k": (0, math.inf),
            "top_p": (0.0, 1.0),
            "min_p": (0.0, 1.0),
            "repeat_penalty": (0.01, 100.0),
            "presence_penalty": (-100.0, 100.0),
            "frequency_penalty": (-100.0, 100.0),
            "penalty_window": (0, math.inf),
        }
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if high == math.inf:
                valid, wanted = isinstance(value, Integral), f"a whole number, {low} or more"
            else:
                valid, wanted = isinstance(value, Real), f"a number from {low:g} to {high:g}"
            if not valid or not low <= value <= high:
                raise SamplingError(f"{name} is {value!r}; it must be {wanted}")
        if any(math.isnan(bias) or bias == math.inf for bias in self.logit_bias.values()):
            raise SamplingError("logit_bias has a value that is no number or is infinite")

    @property
    def penalizes(self) -> bool:
        penalties = (self.repeat_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return self.penalty_window > 0 and any(penalties)

    @property
    def is_greedy(self) -> bool:
        """Whether the largest logit of the model decides alone."""
        return self._keeps_logits and (self.temperature == 0 or self.top_k == 1)

    def may_need_only(self, count: int) -> bool:
        """Whether the `count` largest logits may say what `Sampler.sample_largest` must know of them."""
        return self._keeps_logits and (0 < self.top_k <= count or (self.top_p == 1 and self.min_p > 0))

    @property
    def _keeps_logits(self) -> bool:
        return not self.logit_bias and not self.penalizes


GREEDY = SamplingParams(temperature=0.0)
PARAMETERS = tuple(f.name for f in fields(SamplingParams))


class Sampler:
    """Chooses tokens one after the other; the same `seed` and logits give the same tokens."""

    def __init__(self, params: SamplingParams, seed: int | None = None) -> None:
        self.params = params
        self._random = np.random.default_rng(seed)

    def sample(
        self,
        logits: NDArray[np.float32],
        history: Sequence[int] = (),
        mask: NDArray[np.bool_] | None = None,
    ) -> int:
        """The next token after `history`, from f32 `logits` (vocab,), which stay as they are.

        Only tokens where `mask` (vocab,) is true are considered, by every step. Raises SamplingError if no
        token is left or a logit isn't a number.
        """
        return self._draw(*candidates(adjusted(logits, self.params, history, mask), self.params))

    def sample_largest(self, ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int | None:
        """What `sample` gives for logits of which only the largest are known, in falling order, of equal ones
        the lowest id first. None, and nothing drawn, where the others matter too."""
        params = self.params
        _check_best(float(logits[0]))
        if params.is_greedy:
            return int(ids[0])
        if not params.may_need_only(len(ids)):
            return None
        count = min(params.top_k or len(ids), len(ids))
        # Without an end after `top_k`, it must be known that all others are below min_p's.
        if params.top_k != count and float(logits[-1]) >= _floor(float(logits[0]), params):
            return None
        order = np.argsort(ids[:count])
        return self._draw(*_narrowed(ids[order].astype(np.int64), logits[order].astype(np.float64), params))

    def _draw(self, ids: NDArray[np.int64], kept: NDArray[np.float64]) -> int:
        if len(ids) == 1:
            return int(ids[0])
        with np.errstate(over="ignore"):  # a very low temperature makes all but the best −inf
            weights = np.cumsum(np.exp((kept - kept.max()) / self.params.temperature))
        # The draw is below the sum, so it falls on a token with a weight over 0.
        draw = np.searchsorted(weights, self._random.random() * weights[-1], side="right")
        return int(ids[min(int(draw), len(ids) - 1)])


def adjusted(
    logits: NDArray[np.float32],
    params: SamplingParams,
    history: Sequence[int] = (),
    mask: NDArray[np.bool_] | None = None,
) -> NDArray[np.float32]:
    """`logits` with mask, bias and penalties applied: a copy if that changes any."""
    if mask is None and not params.logit_bias and not params.penalizes:
        return logits
    vocab = len(logits)
    logits = logits.copy() if mask is None else np.where(mask, logits, np.float32(-np.inf))
    for id, bias in params.logit_bias.items():
        if not 0 <= id < vocab:
            raise SamplingError(f"logit_bias names token {id}; the vocabulary has {vocab}")
        logits[id] += bias
    if params.penalizes and history:
        ids, counts = np.unique(np.asarray(history[-params.penalty_window :]), return_counts=True)
        seen = logits[ids]
        seen = np.where(seen > 0, seen / params.repeat_penalty, seen * params.repeat_penalty)
        logits[ids] = seen - params.presence_penalty - params.frequency_penalty * counts
    return logits


def candidates(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The tokens that may be drawn, by id, and their logits: at least one. Greedy leaves exactly one."""
    best = int(np.argmax(logits))  # the first NaN, if there is one
    _check_best(float(logits[best]))
    if params.temperature == 0 or params.top_k == 1:
        return np.array([best]), logits[[best]].astype(np.float64)
    ids = np.arange(len(logits))
    if 0 < params.top_k < len(logits):
        least = np.partition(logits, -params.top_k)[-params.top_k]
        ids = np.flatnonzero(logits >= least)
        # Of those that are equal to the least, the lowest ids.
        surplus = len(ids) - params.top_k
        ids = np.delete(ids, np.flatnonzero(logits[ids] == least)[-surplus:]) if surplus else ids
    return _narrowed(ids, logits[ids].astype(np.float64), params)


def _check_best(logit: float) -> None:
    """Raises SamplingError unless the largest logit may be chosen."""
    if not math.isfinite(logit):
        reason = "no token is allowed" if logit == -math.inf else "the logits aren't finite numbers"
        raise SamplingError(f"there is no next token: {reason}")


def _narrowed(
    ids: NDArray[np.int64], kept: NDArray[np.float64], params: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Those that top-p and min-p leave of tokens by id."""
    if params.top_p < 1:
        chosen = _likeliest(np.exp(kept - kept.max()), params.top_p)
        ids, kept = ids[chosen], kept[chosen]
    chosen = np.flatnonzero((kept >= _floor(float(kept.max()), params)) & (kept > -math.inf))
    order = chosen[np.argsort(ids[chosen])]  # by id: near-ties can't change the order
    return ids[order], kept[order]


def _floor(best: float, params: SamplingParams) -> float:
    """The least logit that min-p leaves, where `best` is the largest."""
    return best + math.log(params.min_p) if params.min_p > 0 else -math.inf


def _likeliest(weights: NDArray[np.float64], fraction: float) -> NDArray[np.int64]:
    """Indices of the fewest of the largest weights whose sum is at least `fraction` of all; one or more.

    Halves the undecided part each round, so it takes time in proportion to the number of weights.
    """
    order = np.arange(len(weights))
    needed = fraction * float(weights.sum())
    low, high = 0, len(weights)  # order[:low] is in and has less than `needed`; order[high:] is out
    while high - low > 1:
        half = (high - low) // 2
        undecided = order[low:high]
        undecided = undecided[np.argpartition(-weights[undecided], half)]
        order[low:high] = undecided
        larger = float(weights[undecided[:half]].sum())
        if larger >= needed:
            high = low + half
        else:
            low, needed = low + half, needed - larger
    return order[:high]
