"""Options that several commands take, and what they mean to the configuration."""

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from raysonar.driver.params import CONTINUATION
from raysonar.errors import ConfigurationError

if TYPE_CHECKING:
    from raysonar.config import EngineConfig

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
"""Where a command adds its parser."""


def add_sampling_options(parser: argparse.ArgumentParser, of_what: str | None = None) -> argparse._ArgumentGroup:
    """The group "sampling", which is returned; `of_what` is its description."""
    group = parser.add_argument_group("sampling", of_what)
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"of an answer (default: until it ends in a chat, else {CONTINUATION}; at most the model's length)",
    )
    group.add_argument("--temperature", type=float, metavar="T", help="(default: 0, the likeliest token)")
    group.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at end-of-sequence")
    return group


def sampling_values(options: argparse.Namespace) -> dict[str, Any]:
    """SamplingParams' fields that were given."""
    names = "max_tokens temperature seed top_p top_k min_p presence_penalty frequency_penalty repetition_penalty"
    return given(options, *names.split(), "stop", "ignore_eos")


def add_chat_options(parser: argparse.ArgumentParser) -> None:
    """How a prompt is taken: `chat`, or None for as the model can."""
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="take a prompt as a user's message (default: when the model has a chat template)",
    )
    form.add_argument("--raw", action="store_false", dest="chat", help="the same as --no-chat: continue the prompt")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """The group "engine"."""
    group = parser.add_argument_group("engine")
    group.add_argument("--draft-model", metavar="FOLDER", help="a small dense Llama that drafts for the model")
    group.add_argument(
        "--speculative-tokens",
        type=int,
        metavar="K",
        help="draft tokens a step, 0 to 8 (default: 3 with a draft model, 1 with an MTP module, else 0)",
    )
    group.add_argument(
        "--dtype",
        help="auto, float32, bfloat16 or float16 (default: auto, as stored; a small one on a CPU as float32)",
    )
    group.add_argument("--device", help="auto, cpu or cuda (default: auto)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice; 1 in serve)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer (default: all)")
    group.add_argument("--max-running", type=int, metavar="N", help="requests that run at once (default: 64)")
    group.add_argument("--token-budget", type=int, metavar="N", help="tokens a step at the most (default: 1024)")
    group.add_argument("--tensor-parallel", type=int, metavar="T", help="ranks that share attention (default: 1)")
    group.add_argument("--data-parallel", type=int, metavar="P", help="rows of ranks, T x P in all (default: 1)")
    group.add_argument(
        "--micro-batching",
        choices=("auto", "never", "always"),
        help="run steps as two overlapping halves (default: auto, where that should be faster)",
    )


def engine_options() -> list[str]:
    """The names of the group "engine"."""
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    return list(vars(parser.parse_args([])))


def add_dry_run(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """The group "dry run", which is returned."""
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print what each rank would hold, and end; status 2 if it does not fit. A folder without weights will do",
    )
    group.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="BYTES",
        help="of each rank, as 80GB or 80GiB (default: the CUDA device's; on a CPU, this machine's over the ranks)",
    )
    return group


def _bytes(text: str) -> int:
    """A count of bytes, with or without a decimal or binary unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 80GB, 80GiB or a count of bytes")
    unit = found[2] or ""
    return int(float(found[1]) * (1024 if unit.endswith("i") else 1000) ** " KMGT".index(unit[:1] or " "))


def port(text: str) -> int:
    """A TCP port."""
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, not {port}")
    return port


def count(text: str) -> int:
    """A number of things, at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"it must be at least 1, not {number}")
    return number


def given(options: argparse.Namespace, *names: str, **fields: str) -> dict[str, Any]:
    """Those options that were given, by name or as another field (`field="option"`)."""
    asked = {**{name: name for name in names}, **fields}
    return {field: value for field, name in asked.items() if (value := getattr(options, name)) is not None}


def engine_values(options: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig's fields."""
    return {
        **given(options, "model", "dtype", "device", "threads", "max_model_len"),
        "speculation": given(options, draft="draft_model", tokens="speculative_tokens"),
        "scheduling": given(options, "max_running", "token_budget"),
        "parallel": given(options, "micro_batching", tensor="tensor_parallel", data="data_parallel"),
    }


def engine_config(options: argparse.Namespace) -> "EngineConfig":
    """Of the bundled demo model when no other was given. Raises ConfigurationError."""
    from raysonar import demo
    from raysonar.config import parse_service_config

    return parse_service_config({"engine": {"model": demo.TARGET, **engine_values(options)}}).engine


def dry_run(config: "EngineConfig", options: argparse.Namespace) -> None:
    """Print what each rank would hold. Raises ConfigurationError when it does not fit."""
    from raysonar.ranks.sizing import size_group

    size = size_group(config, memory=options.device_memory)
    print(json.dumps(size.json()) if options.json else size.text(), flush=True)
    size.check()


def refuse_without_dry_run(options: argparse.Namespace, *names: str) -> None:
    """Raises ConfigurationError for an option that was given and needs --dry-run."""
    for name in names:
        if getattr(options, name):
            advice = "; `serve run FILE` serves a file" if name == "config" else ""
            raise ConfigurationError(f"--{name.replace('_', '-')} is for a --dry-run{advice}")


def overridden(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`values` with those `given` put in, section by section."""
    merged = dict(values)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = overridden(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def read_text(file: str | Path, what: str) -> str:
    """The UTF-8 text of a file; `what` it holds, in words. Raises ConfigurationError."""
    try:
        return Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read {what} from {file}: {error}") from error


def key_of(file: Path | None) -> str | None:
    """The first API key in a file, if there is a file; as in `serve`'s, it may have comments. Raises
    ConfigurationError."""
    if file is None:
        return None
    from raysonar.serving.access import keys_in

    keys = keys_in(read_text(file, "the API key"))
    if not keys:
        raise ConfigurationError(f"{file} has no API key; write one in a line")
    return keys[0]
