"""zllmc: a compiler for large language models."""
