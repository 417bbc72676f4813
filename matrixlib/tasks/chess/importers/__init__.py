"""Readers of chess data in other formats, and the import into checked shards."""
