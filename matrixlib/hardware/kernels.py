"""Functions that numba compiles for this processor, kept for the next process where there is a folder for them."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """`function`, compiled at its first call; it lets other threads go on. numba keeps the code beside the module or in
    the user's cache folder. Where neither can be written it would refuse: then each process compiles for itself.
    """
    compiled: Any
    try:
        compiled = njit(cache=True, nogil=True)(function)
    except RuntimeError:
        warnings.warn(
            "compiled functions cannot be kept, so that each process compiles them for half a minute: let "
            "NUMBA_CACHE_DIR name a folder that can be written",
            stacklevel=1,
        )
        compiled = njit(nogil=True)(function)
    return compiled
