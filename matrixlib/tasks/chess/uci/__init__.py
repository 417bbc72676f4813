"""A network as a UCI engine."""
