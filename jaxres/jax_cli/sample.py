"""`jaxres sample`: text with which the model of a run, or of a folder, continues a prompt."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jaxres import inference
from jaxres.checkpoint.weights.source import parse_step
from jaxres.config.argparser import Parser
from jaxres.exit_codes import ExitCode
from jaxres.faults import UsageError
from jaxres.inference import LoadedModel


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = model_parser("jaxres sample")
    parser.add_argument("--prompt", default="", help="text to continue; - reads standard input")
    parser.add_argument("--tokens", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--temperature", type=float, default=0.8, metavar="T", help="default: 0.8")
    parser.add_argument("--top-k", type=int, metavar="K")
    parser.add_argument("--top-p", type=float, metavar="P")
    parser.add_argument("--seed", type=int, default=0, metavar="S")
    parser.add_argument("--samples", type=int, default=1, metavar="N", help="texts; default: 1")
    try:
        options = parser.parse_args(list(arguments))
    except SystemExit as end:
        return int(end.code or 0) and ExitCode.USAGE
    prompt = _stdin() if options.prompt == "-" else options.prompt
    given = {name: getattr(options, name) for name in ("seed", "temperature", "top_k", "top_p")}
    _check(prompt, options, given)
    loaded = inference.load(options.model, parse_step(options.step))
    if options.samples == 1 and not options.json:
        _stream(loaded, prompt, options.tokens, given)
        return ExitCode.DONE
    texts = loaded.sample(prompt, tokens=options.tokens, rows=options.samples, **given)
    if options.json:
        lines = [json.dumps({"model": loaded.name, "prompt": prompt, "text": t}) for t in texts]
    else:
        lines = [f"{prompt}{text}\n{'-' * 20}" for text in texts]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return ExitCode.DONE


def model_parser(command: str) -> argparse.ArgumentParser:
    """Returns a parser of the arguments of each command on the model of a run or of a folder."""
    parser = Parser(prog=command)
    parser.add_argument("model", metavar="RUN_DIR|FOLDER", help="a run, or a folder in HF's format")
    parser.add_argument("--step", metavar="N|best", help="committed step; default: the newest")
    parser.add_argument("--json", action="store_true")
    return parser


def _stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UsageError(f"--prompt -: standard input is not text ({error})") from error


def _check(prompt: str, options: argparse.Namespace, given: Mapping[str, Any]) -> None:
    found = inference.sampling_problems(
        prompt=prompt, tokens=options.tokens, rows=options.samples, **given
    )
    flags = {"rows": "samples", "top_k": "top-k", "top_p": "top-p"}
    if found:
        lines = [f"--{flags.get(name, name)} {says}" for name, says in found.items()]
        raise UsageError("\n".join(lines))


def _stream(loaded: LoadedModel, prompt: str, count: int, sampling: dict[str, Any]) -> None:
    """Prints a text as it is drawn; characters of several tokens when they are complete."""
    tokens: list[int] = []
    printed = ""
    for drawn in loaded.stream(prompt, tokens=count, **sampling):
        if not tokens:  # Nothing is printed of a model that draws none.
            sys.stdout.write(prompt)
        tokens.append(int(drawn[0]))
        text = loaded.text_tokenizer().decode(tokens)
        if text.startswith(printed) and not text.endswith("\ufffd"):
            sys.stdout.write(text[len(printed) :])
            sys.stdout.flush()
            printed = text
    rest = loaded.text_tokenizer().decode(tokens)
    sys.stdout.write(f"{rest[len(printed) :] if rest.startswith(printed) else ''}\n")
