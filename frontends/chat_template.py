"""Finds the chat templates of a model: in GGUF metadata, or in a Hugging Face folder.

A template is Jinja source and untrusted; `zllmc.runtime.chat_template` renders it. Models may have several,
by name: "default", and often "tool_use".
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zllmc.zllm_ir.errors import ZllmcError

GGUF_KEY = "tokenizer.chat_template"


class ChatTemplateSourceError(ZllmcError):
    """Chat templates that are stored in a way that can't be read."""


def chat_templates_from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name; {} if the file has none. `tokenizer.chat_template.NAME` holds the named ones."""
    templates = {
        key.removeprefix(GGUF_KEY).removeprefix(".") or "default": source
        for key, source in metadata.items()
        if key == GGUF_KEY or key.startswith(f"{GGUF_KEY}.")
    }
    return _checked(templates, "the GGUF file")


def chat_templates_from_hf(folder: Path) -> dict[str, str]:
    """Templates by name; {} if the folder has none.

    Newer folders keep them in `chat_template.jinja` and `additional_chat_templates/NAME.jinja`, older ones in
    `tokenizer_config.json`, as text or as a list of `{"name", "template"}`. The files win.
    """
    templates: dict[str, Any] = {}
    config_path = folder / "tokenizer_config.json"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.exists() else {}
        stored = config.get("chat_template") if isinstance(config, dict) else None
        if isinstance(stored, list):
            templates |= {entry["name"]: entry["template"] for entry in stored}
        elif stored is not None:
            templates["default"] = stored
        for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
            templates[path.stem] = path.read_text(encoding="utf-8")
        if (folder / "chat_template.jinja").exists():
            templates["default"] = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ChatTemplateSourceError(f"{folder}: its chat template can't be read: {error!r}") from error
    return _checked(templates, str(folder))


def _checked(templates: dict[str, Any], where: str) -> dict[str, str]:
    for name, source in templates.items():
        if not isinstance(name, str) or not isinstance(source, str):
            raise ChatTemplateSourceError(f"{where}: chat template {name!r} isn't text")
    return templates
