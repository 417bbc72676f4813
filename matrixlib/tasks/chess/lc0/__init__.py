"""Leela Chess Zero networks: weight files, input planes, moves."""
