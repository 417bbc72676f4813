"""The interactive chess board."""
