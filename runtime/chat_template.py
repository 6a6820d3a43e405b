"""Renders a model's chat template the way `transformers` does.

Templates come with models and are untrusted; `sandbox.py` bounds what they can do. A template that fails is
an error for the user to see: another format in its place would give a prompt unlike what the model knows.
"""

import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import jinja2

from zllmc.runtime.sandbox import MAX_CHARACTERS, OverBudget, TemplateEnvironment, budget
from zllmc.zllm_ir.errors import ZllmcError

MAX_SOURCE_CHARACTERS = 1_000_000


class ChatTemplateError(ZllmcError):
    """A chat template that can't be compiled, that refuses the conversation, or that fails on it."""


class ChatTemplate:
    """A compiled template; may be shared between threads.

    `bos_token` and `eos_token` are the texts of these tokens, "" if the model has none. `now` gives the time
    to `strftime_now`. Raises ChatTemplateError if `source` isn't a template.
    """

    def __init__(
        self,
        source: str,
        bos_token: str = "",
        eos_token: str = "",
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        if len(source) > MAX_SOURCE_CHARACTERS:
            raise ChatTemplateError(f"the chat template has over {MAX_SOURCE_CHARACTERS} characters")
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._now = now
        environment = TemplateEnvironment()
        environment.globals |= {"raise_exception": _raise_exception, "strftime_now": self._strftime_now}
        with _clear_errors(), budget():
            code = environment.compile(environment.parse(source))
            self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, in the form of OpenAI's Chat API.

        `variables` go to the template as they are (`enable_thinking`, `documents`, ...). Tool calls may have
        their arguments as JSON text, as that API has them; templates get them as objects. The text begins
        with BOS if the template says so: encode it with `Tokenizer.encode_prompt`, which adds no second one.
        """
        context = {
            "documents": None,
            **self._tokens,
            **variables,
            "messages": [_with_argument_objects(message) for message in messages],
            "tools": None if tools is None else [*tools],
            "add_generation_prompt": add_generation_prompt,
        }
        with _clear_errors(), budget(len(messages)):
            parts, size = [], 0
            for part in self._template.generate(context):
                parts.append(part)
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise OverBudget(f"it writes over {MAX_CHARACTERS} characters")
        return "".join(parts)

    def _strftime_now(self, format: str) -> str:
        if re.search(r"%\W*\d", format) or len(format) > 1000:
            raise jinja2.exceptions.SecurityError("strftime_now takes no widths")
        return self._now().strftime(format)


class _Refusal(jinja2.TemplateError):
    """The template called `raise_exception`."""


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except _Refusal as error:
        raise ChatTemplateError(f"the chat template refuses this conversation: {error}") from error
    except Exception as error:  # a template may run into any error that Python knows
        what = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        raise ChatTemplateError(f"the chat template fails{_place(error)}: {what}") from error


def _place(error: Exception) -> str:
    """Where in the template: Jinja gives its frames the template's line numbers."""
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f" at line {error.lineno}"
    lines = [
        line
        for frame, line in traceback.walk_tb(error.__traceback__)
        if frame.f_code.co_filename == "<template>"
    ]
    return f" at line {lines[-1]}" if lines else ""


def _with_argument_objects(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message, with the arguments of its tool calls parsed if they are the JSON text of an object."""
    message = dict(message)
    if isinstance(message.get("tool_calls"), list):
        message["tool_calls"] = [_with_argument_object(call) for call in message["tool_calls"]]
    return message


def _with_argument_object(call: Any) -> Any:
    try:
        arguments = json.loads(call["function"]["arguments"])
    except (KeyError, TypeError, ValueError):
        return call
    return (
        {**call, "function": {**call["function"], "arguments": arguments}}
        if isinstance(arguments, dict)
        else call
    )
