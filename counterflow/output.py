"""Standard output that fails in one line: what a command prints may meet a full disk, or a reader that has gone."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO, cast

from counterflow.errors import OutputError


@contextmanager
def checked_output() -> Iterator[None]:
    """What is printed inside is written when the context is left by an exit.

    Raises:
        OutputError: standard output takes no more.
    """
    stream = sys.stdout
    if stream is None:  # It was closed before we came.
        yield
        return
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(errors="backslashreplace")
    try:
        with redirect_stdout(cast(TextIO, _Checked(stream))):
            try:
                yield
            except SystemExit:
                sys.stdout.flush()
                raise
    except BrokenPipeError:
        sys.exit(1)
    finally:
        give_up_unwritten(stream)


def give_up_unwritten(stream: TextIO) -> None:
    """Let go of what a stream cannot write: the interpreter would try again as it ends, and complain."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


class _Checked:
    """A text stream whose failures are told from those of other files; a closed pipe stays what it is."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with _told():
            return self._stream.write(text)

    def flush(self) -> None:
        with _told():
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(
            f"the output cannot be written ({error.strerror or error}): make room there, or send it elsewhere"
        ) from error
