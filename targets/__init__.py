"""One file per target: features, limits, peaks."""
