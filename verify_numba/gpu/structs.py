"""The C types and functions of the CUDA driver that are used here (cuda.h, CUDA 12.0 and later)."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_uint, c_void_p


class _ClusterDim(ctypes.Structure):
    _fields_ = [("x", c_uint), ("y", c_uint), ("z", c_uint)]


class _AttributeValue(ctypes.Union):
    _fields_ = [
        ("pad", ctypes.c_char * 64),
        ("clusterDim", _ClusterDim),
        ("programmaticStreamSerializationAllowed", c_int),
    ]


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: the value starts at byte 8."""

    _fields_ = [("id", c_uint), ("pad", ctypes.c_char * 4), ("value", _AttributeValue)]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("gridDimX", c_uint), ("gridDimY", c_uint), ("gridDimZ", c_uint),
        ("blockDimX", c_uint), ("blockDimY", c_uint), ("blockDimZ", c_uint),
        ("sharedMemBytes", c_uint),
        ("hStream", c_void_p),
        ("attrs", POINTER(LaunchAttribute)),
        ("numAttrs", c_uint),
    ]  # fmt: skip


LAUNCH_CLUSTER_DIMENSION = 4
LAUNCH_PROGRAMMATIC_STREAM_SERIALIZATION = 6

FUNC_STATIC_SHARED_BYTES = 1
FUNC_LOCAL_BYTES = 3
FUNC_REGISTERS = 4
FUNC_MAX_DYNAMIC_SHARED_BYTES = 8

DEVICE_SM_COUNT = 16
DEVICE_L2_BYTES = 38
DEVICE_CC_MAJOR = 75
DEVICE_CC_MINOR = 76
DEVICE_SHARED_BYTES_PER_SM = 81
DEVICE_SHARED_BYTES_OPTIN = 97

ERROR_INVALID_VALUE = 1
ERROR_NO_DEVICE = 100
ERRORS_FOREIGN_CODE = (200, 209, 218, 222)
"""Invalid image, no binary for this GPU, invalid PTX, unsupported PTX version: what an old driver says."""
ERROR_STREAM_CAPTURE_IMPLICIT = 906

PROTOTYPES: dict[str, tuple[type, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorName": (c_int, POINTER(c_char_p)),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGetName": (c_char_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxGetDevice": (POINTER(c_int),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncGetAttribute": (POINTER(c_int), c_int, c_void_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuStreamIsCapturing": (c_void_p, POINTER(c_int)),
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
}
"""Argument types by exported name; every function returns a CUresult.

`cuLaunchKernelEx` takes its configuration as an address: ctypes converts that faster than a typed pointer."""

OPTIONAL: dict[str, tuple[type, ...]] = {"cuFuncLoad": (c_void_p,)}
"""Functions that drivers before CUDA 12.4 lack."""
