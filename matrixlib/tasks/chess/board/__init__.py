"""A board to play on."""
