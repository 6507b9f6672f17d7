"""From a Python kernel function to a launch: compile, cache, load, launch.

| file | holds |
|---|---|
| `spec.py` | `KernelSpec`: what a kernel variant needs, as plain values |
| `compile.py` | kernel function -> PTX -> cubin; needs no GPU |
| `artifact.py` | a compiled variant and its form on disk |
| `cache_key.py`, `cache.py` | the cubin cache, shared by threads and processes |
| `structs.py`, `driver.py` | the CUDA driver interface through ctypes |
| `kernel.py` | `LoadedKernel`: packed arguments and a prebuilt launch configuration |
| `kernel_set.py` | `KernelSet`: loads each variant once per context, refuses inside a graph capture |

Importing any of these imports neither numba nor torch, and touches no GPU.

The package is not called `cuda`: numba-cuda redirects every import whose name contains "numba.cuda".
"""
