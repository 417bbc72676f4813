"""numba kernels, cached on disk where possible."""

import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from numba import njit

Function = TypeVar("Function", bound=Callable[..., Any])


def kernel(function: Function) -> Function:
    """`function`, compiled on first call, without the GIL. numba caches code beside the module or in the user's cache
    folder; if neither is writable, each process compiles for itself."""
    try:
        return cast(Function, njit(cache=True, nogil=True)(function))
    except RuntimeError:
        warnings.warn(
            "compiled functions cannot be kept, so that each process compiles them for half a minute: let "
            "NUMBA_CACHE_DIR name a folder that can be written",
            stacklevel=1,
        )
        return cast(Function, njit(nogil=True)(function))
