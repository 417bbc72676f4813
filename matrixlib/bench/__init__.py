"""Workloads of bench.ipynb, and the command that prints bench.ipynb and probe.ipynb."""
