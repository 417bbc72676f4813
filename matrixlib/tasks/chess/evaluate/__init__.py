"""Evaluation of chess networks: predictions, strength, throughput."""
