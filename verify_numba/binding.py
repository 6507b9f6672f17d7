"""From a call to the numbers that the kernels take, in microseconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from verify_numba.arrays import same_metadata
from verify_numba.batch import VerifyBatch
from verify_numba.validate import MAX_SCALE, MIN_SCALE, Addresses, Form, check_call, check_scale

Bound = tuple[Form, Addresses, float]
"""A checked call: its form, its addresses and its sm_scale."""


class Binder:
    """Checks every call of one Verifier.

    Most calls differ from the one before in addresses only: the layers of a model share all shapes. So the form of the
    last call is kept, with a predicate that says whether other arrays have the same metadata. Where it says yes, the
    rules about addresses are all that is left. `check_call` does the rest, and it alone refuses a call.
    """

    def __init__(self, *, max_bs: int, T: int, H: int, device: int):
        self._limits = {"max_bs": max_bs, "T": T, "H": H, "device": device}
        self._kind: tuple[Any, ...] = ()
        self._same: Callable[..., bool]
        self._form: Form

    def bind(self, batch: VerifyBatch, out: Any, lse: Any | None) -> Bound:
        """The call in numbers. Raises VerifyInputError, naming the field."""
        scale = batch.sm_scale
        if type(scale) is not float or not MIN_SCALE <= scale <= MAX_SCALE:
            scale = check_scale(scale)
        q, k, pool, mask, starts = batch.q, batch.k, batch.kv_pool, batch.custom_mask, batch.mask_indptr
        qo, kv, slots = batch.qo_indptr, batch.kv_indptr, batch.kv_indices
        kind = batch.mask_layout, mask is None, starts is None, lse is None
        given: tuple[Any, ...] = q, k, pool, qo, kv, slots, out
        if mask is not None:
            given += (mask,)
        if starts is not None:
            given += (starts,)
        if lse is not None:
            given += (lse,)
        if kind == self._kind and self._same(*given):
            addresses = (
                q.data_ptr(), k.data_ptr(), pool.data_ptr(), qo.data_ptr(), kv.data_ptr(), slots.data_ptr(),
                0 if mask is None else mask.data_ptr(), 0 if starts is None else starts.data_ptr(),
                out.data_ptr(), 0 if lse is None else lse.data_ptr(),
            )  # fmt: skip
            if _surely_good(addresses, self._form.spans):
                return self._form, addresses, scale
        form, addresses = check_call(batch, out, lse, **self._limits)
        self._kind, self._same, self._form = kind, same_metadata(given), form
        return form, addresses, scale


def _surely_good(addresses: Addresses, spans: tuple[int, ...]) -> bool:
    """The rules about addresses, a little stricter than in `check_call`, and written out: a loop would take longer."""
    q, k, pool, qo, kv, slots, mask, starts, out, lse = addresses
    if (q | k | pool) & 15 or (qo | kv | slots | starts) & 7 or (out | lse) & 3:
        return False
    q_span, k_span, pool_span, qo_span, kv_span, slots_span, mask_span, starts_span, out_span, lse_span = spans
    if not (
        q and k and pool and qo and kv and slots and out
        and (mask or not mask_span) and (starts or not starts_span) and (lse or not lse_span)
    ):  # fmt: skip
        return False
    for low, high in ((out, out + out_span), (lse, lse + lse_span)):
        if (
            q < high and low < q + q_span
            or k < high and low < k + k_span
            or pool < high and low < pool + pool_span
            or qo < high and low < qo + qo_span
            or kv < high and low < kv + kv_span
            or slots < high and low < slots + slots_span
            or mask < high and low < mask + mask_span
            or starts < high and low < starts + starts_span
        ):  # fmt: skip
            return False
    return not (out < lse + lse_span and lse < out + out_span)
