"""What this machine is, how fast it is, and what a run does on it."""
