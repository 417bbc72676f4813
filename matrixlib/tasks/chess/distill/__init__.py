"""A small chess network that learns from a large one."""
