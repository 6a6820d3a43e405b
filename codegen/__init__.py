"""Kernel families as TIR, and builders per target."""
