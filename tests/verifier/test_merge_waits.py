"""The merge is launched while the verify kernel still runs; what follows in the stream waits for the merge alone."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from tests.cases import make_batch
from verify_numba import MaskLayout, Verifier, VerifyBatch
from verify_numba.dims import D_V
from verify_numba.kernels.merge_kernel import MERGE_WARPS, make_merge_kernel
from verify_numba.lockstep.ops import numpy_ops


@pytest.mark.parametrize("prefix", [(0, 5), (300, 0)], ids=["nothing to merge", "one of two to merge"])
def test_every_warp_of_every_block_waits_for_the_verify_kernel(prefix):
    batch = make_batch(prefix=prefix, drafts=(9, 3))
    verifier = Verifier(max_bs=2, T=9, H=8, device="cpu")
    executor, waits = verifier._executor, []
    ops = numpy_ops(executor.plan.geometry)
    ops.after_previous = lambda: waits.append(1)
    executor._merge = make_merge_kernel(ops)

    fields = vars(batch) | {"mask_layout": MaskLayout[batch.mask_layout]}
    verifier.verify(VerifyBatch(**fields), np.empty((batch.N, 8, D_V), ml_dtypes.bfloat16))

    assert len(waits) == 2 * executor.plan.merge_blocks * MERGE_WARPS
