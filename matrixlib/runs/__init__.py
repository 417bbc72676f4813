"""A run, and everything that is made of runs."""
