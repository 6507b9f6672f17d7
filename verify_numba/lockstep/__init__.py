"""The kernels without a GPU: the same source as plain Python, operations in NumPy, a greenlet a warp."""

from verify_numba.lockstep.errors import DeadlockError, LockstepError, MemoryFault, ProtocolError, RaceError
from verify_numba.lockstep.launch import run_kernel
from verify_numba.lockstep.memory import GlobalMemory
from verify_numba.lockstep.ops import numpy_ops

__all__ = [
    "DeadlockError",
    "GlobalMemory",
    "LockstepError",
    "MemoryFault",
    "ProtocolError",
    "RaceError",
    "numpy_ops",
    "run_kernel",
]
