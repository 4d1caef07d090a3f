"""Where a command's text and its JSON go."""

from __future__ import annotations

import json
import math
import os
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table


class UsageError(Exception):
    """The command cannot do what was asked; its text says what would work."""


class Unwritable(Exception):
    """A standard stream takes no more: why, and ``unread``, whether its reader has left."""

    def __init__(self, error: OSError):
        super().__init__(f"cannot write its output: {error.strerror or error}")
        self.unread = isinstance(error, BrokenPipeError)


class Stream:
    """A standard stream that fails with :class:`Unwritable`, once: what follows is dropped, so that
    neither rich nor the end of the interpreter fails again. ``stream`` None: it was closed."""

    def __init__(self, stream: TextIO | None):
        self._stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._fail(error)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        with suppress(OSError), open(os.devnull, "w") as null:
            os.dup2(null.fileno(), self._stream.fileno())  # a stream in memory has none
        raise Unwritable(error) from error


def write_file(path: str, data: bytes) -> None:
    """All of ``data`` at ``path`` or, with an OSError, what was there before."""
    target = Path(path).resolve()
    special = target.exists() and not target.is_file()  # a device or a pipe
    if special or not os.access(target.parent, os.W_OK):
        target.write_bytes(data)
        return
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_bytes(data)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    """JSON has no infinity or NaN: those become strings."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


class Output:
    """Text on stdout, unless stdout carries the JSON; progress only on a terminal."""

    def __init__(self, json_path: str | None):
        self.json_path = json_path
        self.stdout = Stream(sys.stdout)
        text = Stream(sys.stderr) if json_path == "-" else self.stdout
        self.console = Console(file=text, highlight=False)
        if not self.console.is_terminal:
            # A pipe or a log: lines as long as they are, not folded at 80 columns.
            self.console.width = 160

    def write_json(self, data: dict | list) -> None:
        if self.json_path is None:
            return
        text = json.dumps(_plain(data), indent=2, default=str) + "\n"
        if self.json_path == "-":
            self.stdout.write(text)
            self.stdout.flush()
        else:
            try:
                write_file(self.json_path, text.encode())
            except OSError as error:
                raise UsageError(f"--json: {error}") from error
            self.console.print(f"wrote {self.json_path}", markup=False)

    def table(self, title: str, columns: list[str], rows: list[list[str]]) -> None:
        widest = [max(map(len, column)) + 3 for column in zip(columns, *rows, strict=True)]
        if self.console.width < min(80, sum(widest)):
            # Columns would be folded to a letter or two: a line a row, which wraps between words.
            self.console.print(title, style="bold", markup=False)
            for row in rows:
                named = [f"{c} {x}" for c, x in zip(columns, row, strict=True) if x]
                text = ": ".join(row) if len(row) == 2 else ", ".join(named)
                self.console.print(f"- {text}", markup=False)
            return
        table = Table(title=title, title_justify="left", title_style="bold")
        for i, name in enumerate(columns):
            numeric = rows and all(_numeric(r[i]) for r in rows)
            table.add_column(name, justify="right" if numeric else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    @contextmanager
    def progress(self, text: str, lines: bool = False, total: int | None = None):
        """A spinner with the time passed; yields a function that changes its text.

        With ``total`` a bar: each new text begins the next of that many steps. Without a terminal:
        nothing, or with ``lines`` each text on a line of its own.
        """
        if not self.console.is_terminal:
            yield lambda new: self.console.print(f"... {new}", markup=False) if lines else None
            return
        counted = () if total is None else (BarColumn(), MofNCompleteColumn())
        spinner = SpinnerColumn("dots" if self.console.encoding.startswith("utf") else "line")
        columns = (spinner, TextColumn("{task.description}"), *counted, TimeElapsedColumn())
        with Progress(*columns, console=self.console, transient=True) as bar:
            task = bar.add_task(text, total=total, completed=-1 if counted else 0)
            yield lambda new: bar.update(task, description=new, advance=1)


def _numeric(text: str) -> bool:
    if text in ("", "-"):
        return True
    try:
        float(text.rstrip("x%"))
    except ValueError:
        return False
    return True
