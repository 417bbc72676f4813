"""What is timed in bench.ipynb, and the command that prints what bench.ipynb and probe.ipynb show."""
