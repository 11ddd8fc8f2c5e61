"""Memory that training frees and needs again in the next step: kept by the process instead of given back."""

import ctypes
import functools
import sys

# Of glibc's malloc.h. Larger blocks than the first are the system's own pages, cleared anew at every use; free memory
# beyond the second at the end of the heap goes back to the system. The first is the largest that glibc takes.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGEST_KEPT = 32 * 2**20
_MOST_KEPT = 128 * 2**20


@functools.cache
def keep_freed_memory() -> None:
    """Let this process reuse freed activations; does nothing where the C library is not glibc."""
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
    mallopt(_TRIM_THRESHOLD, _MOST_KEPT)
