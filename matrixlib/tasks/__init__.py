"""One folder a task."""
