"""Search and matches over a Game."""
