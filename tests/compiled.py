"""Numba's functions, called as this is imported: processes that are forked afterwards need not load them."""

import warm

warm.compile_kernels()
