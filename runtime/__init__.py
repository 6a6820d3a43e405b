"""Artifact, drivers, KV cache, generation. Imports neither the compiler nor TVM."""
