"""Functions that numba compiles."""

from typing import Any

import pytest
from numba.core import caching

from matrixlib.hardware.kernels import kernel


def twice(number: int) -> int:
    return 2 * number


def test_where_nothing_can_be_kept_a_function_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    with pytest.warns(UserWarning, match="let NUMBA_CACHE_DIR name a folder that can be written"):
        compiled: Any = kernel(twice)
    assert compiled(21) == 42
    assert len(compiled.signatures) == 1
