"""Chess: records, planes, network, losses, sources."""
