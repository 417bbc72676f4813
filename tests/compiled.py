"""Numba's functions, called as this is imported: processes that are forked afterwards need not load them, nor look
through all that has been imported when they collect garbage."""

import gc

import warm

warm.compile_kernels()
gc.collect()
gc.freeze()
