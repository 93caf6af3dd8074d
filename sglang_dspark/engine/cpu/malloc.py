"""Keeps freed tensor memory inside the process, so that each step's activations do not page-fault again."""

import ctypes
import platform

# From glibc's malloc.h.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
# glibc's own ceiling for the mmap threshold (DEFAULT_MMAP_THRESHOLD_MAX on 64 bit).
MMAP_THRESHOLD = 32 << 20
# Free memory at the top of the heap that is kept: more than one forward pass's activations of a model a CPU can serve.
TRIM_THRESHOLD = 1 << 30


def keep_tensors_on_heap() -> bool:
    """Raise glibc's mmap and trim thresholds; returns False where malloc is not glibc's.

    By default a 3 MB tensor is given back to the kernel when freed and faulted in, page by page, when allocated again.
    Measured on an AVX2 server core: gathering keys and values of 16 requests x 256 tokens (2 x 3 MB) takes 8.8 ms
    with the defaults and 0.59 ms with these settings.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    return bool(libc.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD) and libc.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD))
