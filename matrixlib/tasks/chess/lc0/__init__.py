"""Networks of Leela Chess Zero: its weight files, input planes and moves."""
