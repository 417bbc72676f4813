"""Stockfish: client, position labels, generated data sets."""
