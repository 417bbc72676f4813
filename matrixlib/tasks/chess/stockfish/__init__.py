"""Games and labels made with Stockfish."""
