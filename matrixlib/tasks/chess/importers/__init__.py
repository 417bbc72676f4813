"""Import of chess data in other formats into checked shards."""
