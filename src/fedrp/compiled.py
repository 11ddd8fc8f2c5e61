"""Inner loops compiled by Numba: on first use, and kept on disk for the next process.

Arithmetic is IEEE in a fixed order, never fused or reordered: the same bits on every machine.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import platformdirs

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


def cache_folder() -> Path:
    """Where compiled code is kept: the folder that FEDRP_CACHE names, else `fedrp` in the user's cache folder."""
    return Path(os.environ.get("FEDRP_CACHE") or platformdirs.user_cache_path("fedrp")).expanduser() / "kernels"


def compiled(function: Kernel) -> Kernel:
    """Compile on the first call. Where no folder for compiled code can be written, each process compiles anew.

    Divisions by zero give what IEEE says, and the GIL is released.
    """
    settings = vars(numba.config)
    usual = settings["CACHE_DIR"]
    settings["CACHE_DIR"] = usual or str(cache_folder())  # read while a function is decorated, and never again
    try:
        return cast(Kernel, numba.njit(nogil=True, cache=True, error_model="numpy")(function))
    except RuntimeError:
        return cast(Kernel, numba.njit(nogil=True, error_model="numpy")(function))
    finally:
        settings["CACHE_DIR"] = usual
