"""Graph to kernel graph, one file per pass."""
