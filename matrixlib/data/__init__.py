"""Bytes on disk: shards, catalogue, loader; the record dtype is given by the task."""
