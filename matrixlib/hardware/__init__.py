"""What this machine is, how fast it is, and what is decided from that."""
