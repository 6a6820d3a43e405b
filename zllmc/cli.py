"""The `zllmc` command. Each command imports what it needs when it runs: starting costs no time."""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

import click

from zllmc.options import (
    compile_options,
    device_option,
    integers,
    json_option,
    model_argument,
    speculate_option,
    threads_option,
)
from zllmc.zllm_ir.errors import ZllmcError

EPILOGUE = """\b
Examples:
  zllmc run model.gguf "Why is the sky blue?"
  zllmc compile model.gguf -o model.zllm
  zllmc run model.zllm
"""
INTERRUPTED = 130  # as shells have it


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command line and exits: 2 for errors that the user can do something about."""
    atexit.register(gc.freeze)  # else the interpreter looks for garbage in all that goes away with it
    gc.set_threshold(100_000)  # … and again and again in vocabularies and graphs, where there is hardly any
    sys.setswitchinterval(0.001)  # threads that pack and hash need the interpreter often, and for an instant
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # text that the terminal's encoding can't say is no error
            stream.reconfigure(errors="replace")
    try:
        code = cli.main(arguments, prog_name="zllmc", standalone_mode=False)
        sys.stdout.flush()
    except ZllmcError as error:
        code = _fail(str(error), error.exit_code)
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except (KeyboardInterrupt, click.Abort):
        code = _fail("interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader has left; the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1  # as click has it
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        code = _fail(f"{place}{error.strerror or error}", ZllmcError.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> int:
    from zllmc.wording import harmless

    print(f"zllmc: {harmless(' '.join(message.split()))}", file=sys.stderr)
    return code


@click.group(epilog=EPILOGUE, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="zllmc")
def cli() -> None:
    """Compile language models ahead of time, and run them."""


@cli.command(
    "compile",
    epilog="""\b
Examples:
  zllmc compile model.gguf
  zllmc compile folder-from-hugging-face/ -o model.zllm --context 32768 --kv q8
  zllmc compile model.gguf --target cpu:avx2 --dump-ir ir/
""",
)
@model_argument
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="The artifact.  [default: MODEL's name + .zllm]"
)
@compile_options
@click.option(
    "--max-batch", default=8, show_default=True, type=int, help="Sequences of a decode pass, up to 256."
)
@click.option(
    "--dump-ir",
    type=click.Path(path_type=Path),
    help="Write the graph after every pass to this folder: text, and a picture (SVG).",
)
@click.option("--verify", is_flag=True, help="Check the graph after every pass.")
def compile_command(
    model: Path,
    output: Path | None,
    target: str | None,
    context: int | None,
    kv: str | None,
    max_batch: int,
    dump_ir: Path | None,
    verify: bool,
) -> None:
    """Compile MODEL into an artifact. A GGUF file and a Hugging Face folder are models."""
    from zllmc.cache import is_artifact, kernel_cache

    if is_artifact(model):
        raise click.UsageError(f"{model} is compiled already: `zllmc run` takes it as it is")
    from zllmc.compiler import compile_model
    from zllmc.terminal import progress_bars
    from zllmc.wording import gib

    output = output or Path(
        f"{model.resolve().stem if model.suffix == '.gguf' else model.resolve().name}.zllm"
    )
    begin = time.perf_counter()
    with progress_bars() as progress:
        compile_model(
            model,
            output,
            target=target or "cpu",
            context=context,
            kv=kv or "f16",
            max_batch=max_batch,
            dump_ir=dump_ir,
            verify=verify,
            kernel_cache=kernel_cache(),
            progress=progress,
        )
    size = sum(path.stat().st_size for path in output.rglob("*") if path.is_file())
    click.echo(f"{output}: {gib(size)} in {time.perf_counter() - begin:.1f} s")


@cli.command(
    epilog="""\b
Examples:
  zllmc run model.gguf                         chat
  zllmc run model.gguf "Write a haiku."        one answer
  git diff | zllmc run model.zllm - --system "Summarise this change."
  zllmc run model.zllm --raw --temperature 0 "The capital of France is"
"""
)
@model_argument
@click.argument("prompt", required=False)
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option(
    "--max-tokens", type=click.IntRange(1), metavar="N", help="Tokens of an answer.  [default: no limit]"
)
@click.option("--temperature", type=float, help="0 always takes the likeliest token.  [default: 0.8]")
@click.option("--top-k", type=int, help="Consider the K likeliest tokens; 0: all.  [default: 40]")
@click.option(
    "--top-p", type=float, help="Consider the likeliest tokens up to this probability.  [default: 0.95]"
)
@click.option("--min-p", type=float, help="… and at least this fraction of the likeliest's.  [default: 0.05]")
@click.option("--repeat-penalty", type=float, help="1: off.  [default: 1]")
@click.option("--presence-penalty", type=float, help="[default: 0]")
@click.option("--frequency-penalty", type=float, help="[default: 0]")
@click.option(
    "--stop", multiple=True, metavar="TEXT", help="End an answer before this text; may be repeated."
)
@click.option("--seed", type=click.IntRange(0), help="Makes answers repeatable.")
@speculate_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing but answers.")
@threads_option
@device_option
@compile_options
def run(
    model: Path,
    prompt: str | None,
    system: str | None,
    raw: bool,
    max_tokens: int | None,
    stop: tuple[str, ...],
    seed: int | None,
    speculate: Literal["ngram"] | None,
    quiet: bool,
    threads: int | None,
    device: Literal["emulate", "eager"] | None,
    target: str | None,
    context: int | None,
    kv: str | None,
    **sampling: float | None,
) -> None:
    """Chat with MODEL, or answer PROMPT and end.

    MODEL is an artifact, or a model that is compiled once into a cache. A PROMPT of "-" is all of stdin;
    without PROMPT, every line of stdin is a question.
    """
    from zllmc import chat
    from zllmc.cache import is_artifact, load
    from zllmc.runtime.sampling import SamplingParams
    from zllmc.terminal import note, progress_bars
    from zllmc.wording import headline

    params = SamplingParams(**{name: value for name, value in sampling.items() if value is not None})  # type: ignore[arg-type]
    if is_artifact(model) and any(value is not None for value in (target, context, kv)):
        raise click.UsageError("--target, --context and --kv belong to compiling; MODEL is compiled already")
    with progress_bars() as progress:
        engine = load(
            model,
            threads=threads,
            device=device,
            target=target or "cpu",
            context=context,
            kv=kv or "f16",
            progress=progress,
        )
    with engine:
        if not quiet:
            note(headline(engine.manifest))
        if engine.chat_template is None and not raw:
            note("the model has no chat template: it continues the text as it is")
            raw = True
        if raw and system is not None:
            raise click.UsageError(
                "--system needs a chat template; without one there is only the text itself"
            )
        conversation = chat.Conversation(engine, params, system, max_tokens, stop, seed, raw, speculate)
        if prompt is None:
            chat.converse(conversation)
            return
        complete = chat.answer_once(conversation, sys.stdin.read() if prompt == "-" else prompt, quiet=quiet)
        if not quiet:
            note(conversation.stats())
        if not complete:
            sys.exit(INTERRUPTED)


@cli.command()
@model_argument
@json_option
def info(model: Path, as_json: bool) -> None:
    """Show what MODEL is and needs. Of a model it also says which targets have kernels for it."""
    from zllmc.info import show_info

    show_info(model, as_json=as_json)


@cli.command()
@json_option
def targets(as_json: bool) -> None:
    """Show the targets, and which formats each of them runs."""
    from zllmc.support import show_targets

    show_targets(as_json=as_json)


@cli.command(
    epilog="""\b
Examples:
  zllmc verify model.gguf
  zllmc verify model.zllm                      its files only
  zllmc verify model.zllm --against reference.npz
"""
)
@model_argument
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    help="Compare with the `tokens` and `logits` of this .npz file.",
)
@click.option(
    "--source", type=click.Path(path_type=Path), help="The model that the artifact MODEL was compiled from."
)
@click.option(
    "--tokens", default=24, show_default=True, type=click.IntRange(2), help="Length of the test sequence."
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, min_open=True),
    help="Largest NMSE of the logits.  [default: by the model's formats]",
)
@json_option
@threads_option
@device_option
@compile_options
def verify(
    model: Path,
    against: Path | None,
    source: Path | None,
    tokens: int,
    tolerance: float | None,
    as_json: bool,
    threads: int | None,
    device: Literal["emulate", "eager"] | None,
    target: str | None,
    context: int | None,
    kv: str | None,
) -> None:
    """Check that MODEL computes what it should.

    Its files are checked, and every kernel and the logits compared with the reference interpreter's. The exit
    code is 1 if anything is out of tolerance, 2 if a file is damaged. An artifact needs --source or --against
    for more than its files.
    """
    from zllmc.cache import is_artifact
    from zllmc.terminal import progress_bars
    from zllmc.verify import cached_and_whole, verify_artifact

    artifact = model
    if not is_artifact(model):
        source = model
        with progress_bars() as progress:
            artifact = cached_and_whole(model, target or "cpu", context, kv or "f16", progress)
    passed = verify_artifact(
        artifact,
        source=source,
        against=against,
        tokens=tokens,
        tolerance=tolerance,
        threads=threads,
        device=device,
        as_json=as_json,
    )
    sys.exit(0 if passed else 1)


@cli.command(
    epilog="""\b
Examples:
  zllmc bench model.zllm
  zllmc bench model.zllm --threads 1 --prompt 512 --tokens 128 --depth 4096 --json
  zllmc bench model.zllm --batch 1,2,4,8
  zllmc bench model.gguf --model-only --target cuda:sm_90
"""
)
@model_argument
@click.option(
    "--prompt", default=512, show_default=True, type=click.IntRange(1), help="Tokens of the prompt."
)
@click.option("--tokens", default=128, show_default=True, type=click.IntRange(1), help="Tokens to decode.")
@click.option("--depth", default=0, show_default=True, type=click.IntRange(0), help="Tokens cached before.")
@click.option(
    "--repeat", default=5, show_default=True, type=click.IntRange(1), help="Runs; medians are shown."
)
@click.option(
    "--batch",
    "batches",
    metavar="N,N,…",
    callback=integers,
    help="Decode also in batches of so many sequences, for example 1,2,4,8.",
)
@speculate_option
@click.option("--profile", is_flag=True, help="Show the time of every kernel.")
@click.option("--model-only", is_flag=True, help="Reckon on the peaks of the GPU --target; run nothing.")
@click.option("--target", metavar="TARGET", help="The GPU of --model-only.")
@json_option
@threads_option
def bench(
    model: Path,
    prompt: int,
    tokens: int,
    depth: int,
    repeat: int,
    batches: Sequence[int],
    speculate: Literal["ngram"] | None,
    profile: bool,
    model_only: bool,
    target: str | None,
    as_json: bool,
    threads: int | None,
) -> None:
    """Measure how fast MODEL runs. That is loading, prefill, decode, the first token, and memory."""
    if model_only != (target is not None):
        raise click.UsageError("--model-only takes a --target like cuda:sm_90, and no other bench does")
    if target is not None:
        from zllmc.roofline import run_model_only

        run_model_only(model, target, prompt=prompt, depth=depth, as_json=as_json)
        return
    from zllmc.bench import run_bench
    from zllmc.cache import artifact_of
    from zllmc.terminal import progress_bars

    with progress_bars() as progress:
        artifact = artifact_of(model, progress=progress)
    run_bench(
        artifact,
        prompt=prompt,
        tokens=tokens,
        depth=depth,
        repeat=repeat,
        batches=batches,
        speculate=speculate is not None,
        profile=profile,
        as_json=as_json,
        threads=threads,
    )


if __name__ == "__main__":
    main()
