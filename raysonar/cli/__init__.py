"""The command line: `raysonar COMMAND`, a module each. Heavy imports wait until a command needs them."""

import argparse
import io
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version

from raysonar.cli.batch import add_batch
from raysonar.cli.bench import add_bench
from raysonar.cli.generate import add_generate
from raysonar.cli.serve import add_serve
from raysonar.errors import ConfigurationError, RaysonarError

INTERRUPTED = 128 + signal.SIGINT
"""The shell's exit status of a program that Ctrl-C ended."""
FAILED = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; errors are one line on stderr and status 2."""
    options = _parser().parse_args(arguments)
    try:
        if sys.stdout is None:
            raise ConfigurationError("the standard output is closed")
        options.run(options)
        sys.stdout.flush()
    except RaysonarError as error:
        print(f"raysonar: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        _discard_output()
    except OSError as error:
        _discard_output()
        print(f"raysonar: {error}", file=sys.stderr)
        return FAILED
    return 0


def _discard_output() -> None:
    """Let nothing more be flushed at exit into a standard output that takes no more."""
    with suppress(io.UnsupportedOperation):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raysonar", description="Mixture-of-experts models with multi-token-prediction speculation."
    )
    parser.add_argument("--version", action="version", version=f"raysonar {version('raysonar')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    add_generate(commands)
    add_serve(commands)
    add_batch(commands)
    add_bench(commands)
    return parser
