"""How far a correct bf16 kernel may be from the float64 answer, row by row, derived and not tuned.

Four errors are unavoidable for a kernel that multiplies bf16 matrices and accumulates in float32. With
weights p_j, values v_j, scores s_j (scaled, natural units) and out = sum_j p_j v_j of one row:

1. **Weights in bf16.** Before they multiply the values, weights are rounded to bf16, relative to a maximum
   that may trail the true one. So the rounding is done here, for eight such maxima, 0 to 7/8 in log2, and the
   worst is taken: r = sum_j (bf16(p_j 2^d) 2^-d - p_j) v_j. It keeps its size where out cancels to almost
   nothing, and it knows about keys that are alike and round alike. The kernel may be off by **twice** this
   error of the reference. Splits have a maximum each, so that a few heavy keys may round against each other
   in a way that no common maximum shows: in a single column at least
   SIGMAS 2^-8 / sqrt(3) sqrt(sum_j (p_j v_j)^2) is allowed, the spread of independent roundings, but for this
   no more than their bound, 2^-8 sum_j |p_j v_j|.
2. **The output in bf16**: half an ulp of the output.
3. **Scores in float32.** Accumulating D_QK products in STEPS steps leaves on s_j an error of about
   e_j = STEPS 2^-24 (|s_j| + w_j), where w_j = sm_scale sqrt(sum_d (q_d k_jd)^2) is the size of a random
   partial sum. Independent errors give out a variance of sum_j (p_j e_j)^2 (v_j - out)^2 (SIGMAS of it are
   allowed); truncation in the tensor cores acts as a common factor on all scores and shifts out by
   STEPS 2^-24 |sum_j p_j s_j (v_j - out)|. Both vanish for a row that one key dominates, and matter for
   queries of large norm.
4. **Sums in float32** over n keys: 4 sqrt(n) 2^-24 |out|.

For one column the errors add up. For the norm of a row, where 512 columns even out, the independent ones (1,
2 and the spread of 3, each by its expected norm) add in quadrature, doubled once, and the shifts are added.

The lse has no bf16 in it: its budget is the third and fourth error, and a few float32 ulp of its own. That is
why a wrong base, a lost or a doubled key show there first.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oracle.attention import Array
from oracle.batch import BatchLike, Request, requests, visible
from oracle.bf16_reference import round_bf16
from verify_numba.dims import D_V

U32 = 2.0**-24
"""Half an ulp of float32, relative."""
UBF16 = 2.0**-8
"""Half an ulp of bf16, relative."""
STEPS = 32.0
"""Rounded additions on the way to one score: 576 products, 16 in a tensor-core step, and the scaling."""
SIGMAS = 6.0
REFERENCE_FACTOR = 2.0
_HEADROOMS = np.arange(8) / 8
_TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, eq=False)
class ErrorBudget:
    """Allowed errors of a kernel's output against the float64 answer."""

    out_abs: Array
    """[N, H] float64, largest absolute error in any column of a row."""
    out_norm: Array
    """[N, H] float64, largest Euclidean norm of a row's error."""
    out_rel: float
    """Largest Frobenius norm of the error of the whole output, relative to the output's."""
    lse_abs: Array
    """[N, H] float64, largest absolute error of the natural-log lse."""

    def use(self, out: Array, lse: Array | None, exact: tuple[Array, Array]) -> BudgetUse:
        """Measure a kernel's ``out`` [N, H, D_V] and ``lse`` [N, H] (any float dtypes) against this budget.

        ``exact`` is what :func:`oracle.verify_batch` gave. Where it is not finite, the kernel must not be
        either.
        """
        error = _error(out, exact[0])
        row = np.sqrt((error**2).sum(axis=2))
        size = float(np.sqrt((np.where(np.isfinite(exact[0]), exact[0], 0.0) ** 2).sum()))
        total = float(np.sqrt((row**2).sum()))
        return BudgetUse(
            out_abs=_ratio(error.max(axis=2, initial=0.0), self.out_abs),
            out_norm=_ratio(row, self.out_norm),
            out_rel=_ratio(np.array(total), np.array(self.out_rel * size)),
            lse_abs=0.0 if lse is None else _ratio(_error(lse, exact[1]), self.lse_abs),
        )


@dataclass(frozen=True)
class BudgetUse:
    """Largest ratio of an error to what is allowed, for each measure; at most 1 is a pass."""

    out_abs: float
    out_norm: float
    out_rel: float
    lse_abs: float

    @property
    def worst(self) -> float:
        """The largest of the four."""
        return max(self.out_abs, self.out_norm, self.out_rel, self.lse_abs)

    @property
    def ok(self) -> bool:
        """Whether everything is within the budget."""
        return self.worst <= 1.0


def error_budget(batch: BatchLike, parts: object = "ALL") -> ErrorBudget:
    """The budget for a batch, or one part of it, from its inputs; arguments as for ``verify_batch``."""
    n, h = batch.q.shape[:2]
    out_abs, out_norm, lse_abs, size = (np.zeros((n, h)) for _ in range(4))
    for request in requests(batch):
        for i, (keys, q) in enumerate(_tokens(request, parts)):
            at = request.tokens.start + i
            if len(keys):
                out_abs[at], out_norm[at], lse_abs[at], size[at] = _row_budget(q, keys, float(batch.sm_scale))
    whole = float(np.sqrt((size**2).sum()))
    rel = float(np.sqrt((out_norm**2).sum())) / whole if whole else 0.0
    return ErrorBudget(out_abs, out_norm, rel, lse_abs)


def half_ulp(values: Array) -> Array:
    """Half the distance between neighbouring bf16 numbers at the magnitude of ``values``, float64."""
    exponent = np.frexp(np.maximum(np.abs(values), _TINY))[1]
    return np.asarray(np.ldexp(1.0, exponent - 9), dtype=np.float64)


def _tokens(request: Request, parts: object) -> list[tuple[Array, Array]]:
    """Keys seen [n, D_QK] and queries [H, D_QK] of each draft token, float64."""
    keys, sees = visible(request, parts)
    return [(keys[seen].astype(np.float64), request.q[i].astype(np.float64)) for i, seen in enumerate(sees)]


def _row_budget(q: Array, keys: Array, sm_scale: float) -> tuple[Array, Array, Array, Array]:
    """out_abs, out_norm, lse_abs and the norm of out of one token, [H] each; 0 where it is not finite."""
    with np.errstate(invalid="ignore", over="ignore"):
        scores = sm_scale * (q @ keys.T)
        walk = sm_scale * np.sqrt((q**2) @ (keys**2).T)
        top = scores.max(axis=1, keepdims=True)
        raw = np.exp(scores - top)
        total = raw.sum(axis=1, keepdims=True)
        p = raw / total
        values = keys[:, :D_V]
        out = p @ values
        lse = (top + np.log(total))[:, 0]
        noise = p * STEPS * U32 * (np.abs(scores) + walk)

        weights = _weight_rounding(raw, total, values)
        spread, drift = _score_error(p, scores, noise, values, out)
        sums = 4 * np.sqrt(len(keys)) * U32
        drift += sums * np.abs(out) + _TINY * (1 + np.abs(values).max())
        reference = REFERENCE_FACTOR * np.abs(weights).max(axis=(0, 2))[:, None]
        inner = np.maximum(reference, _independent_rounding(p, values)) + SIGMAS * spread + drift
        rounding = half_ulp(np.abs(out) + inner)
        lse_abs = (
            SIGMAS * np.sqrt((noise**2).sum(axis=1))
            + STEPS * U32 * np.abs((p * scores).sum(axis=1))
            + sums
            + U32 * (8 + 4 * np.abs(lse))
        )
        inner_norm = np.sqrt((weights**2).sum(axis=2).max(axis=0) + (spread**2 + rounding**2 / 3).sum(axis=1))
        out_norm = REFERENCE_FACTOR * inner_norm + np.sqrt((drift**2).sum(axis=1))
        finite = np.isfinite(out).all(axis=1) & np.isfinite(lse)
        results = ((inner + rounding).max(axis=1), out_norm, lse_abs, np.sqrt((out**2).sum(axis=1)))
        a, b, c, d = (np.where(finite, each, 0.0) for each in results)
        return a, b, c, d


def _weight_rounding(raw: Array, total: Array, values: Array) -> Array:
    """[headrooms, H, D_V]: the error of out when the weights are bf16, for each maximum they may refer to."""
    lift = np.exp2(_HEADROOMS)[:, None, None]
    rounding = round_bf16(raw * lift) / lift - raw
    return np.asarray((rounding / total) @ values)


def _independent_rounding(p: Array, values: Array) -> Array:
    """[H, D_V]: the error of out when every weight rounds on its own."""
    likely = SIGMAS * UBF16 / np.sqrt(3) * np.sqrt(p**2 @ values**2)
    return np.asarray(np.minimum(likely, UBF16 * (p @ np.abs(values))))


def _score_error(p: Array, scores: Array, noise: Array, values: Array, out: Array) -> tuple[Array, Array]:
    """Standard deviation and drift of out, [H, D_V] each, from float32 scores. ``noise`` is p_j e_j."""
    squares = noise**2
    variance = (
        squares @ values**2 - 2 * out * (squares @ values) + out**2 * squares.sum(axis=1, keepdims=True)
    )
    tilt = (p * scores) @ values - out * (p * scores).sum(axis=1, keepdims=True)
    return np.sqrt(np.maximum(variance, 0.0)), STEPS * U32 * np.abs(tilt)


def _error(got: Array, exact: Array) -> Array:
    """Absolute error, float64: 0 where both are not finite alike, inf where only one is."""
    got = np.asarray(got).astype(np.float64).reshape(exact.shape)
    both = np.isfinite(got) & np.isfinite(exact)
    alike = (got == exact) | (np.isnan(exact) & ~np.isfinite(got))
    with np.errstate(invalid="ignore"):
        return np.where(both, np.abs(got - exact), np.where(alike, 0.0, np.inf))


def _ratio(error: Array, allowed: Array) -> float:
    """The largest error over allowed, where no error needs no allowance."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.where(error == 0, 0.0, error / allowed).max(initial=0.0))
