"""Data that somebody else made, brought in as checked shards."""
