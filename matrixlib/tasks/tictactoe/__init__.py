"""Tic-tac-toe: the second game that a cycle can play, small enough to be known whole."""
