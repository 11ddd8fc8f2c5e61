"""Shared type names, and the wire constants that algorithms need."""

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float32]  # (n,) or (m,)
Precise = npt.NDArray[np.float64]  # the same, before it is rounded
Words = npt.NDArray[np.uint32]  # an upload as whole numbers modulo 2^32
Packets = dict[int, bytes]  # client -> packet

FINGERPRINT_BYTES = 16  # of the mark in a message's header
NO_FINGERPRINT = bytes(FINGERPRINT_BYTES)
MAX_COUNT = 2**31  # numbers in a message, at most
