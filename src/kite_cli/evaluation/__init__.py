"""What `kite eval` does: which blends are asked for, what they are tried on, and how they do on an engine."""
