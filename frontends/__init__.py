"""Container readers, tokenizers, chat templates and architectures."""
