"""Standard output and standard error that can never stop a run.

Whatever a run says on the terminal is in its log file too. So a text that can't be shown is dropped, a character that
can't be shown is replaced, and a reader that does not read is not waited for.
"""

import codecs
import contextlib
import io
import os
import select
import sys

PLAIN = {"β": "beta", "π": "pi", "μ": "mu", "²": "^2", "·": "*", "×": "x", "→": "->"}
PLAIN |= {"−": "-", "–": "-", "—": "-", "…": "...", "’": "'", "‘": "'", "“": '"', "”": '"', "≥": ">=", "≤": "<="}
PLAIN |= dict.fromkeys("─━═", "-") | dict.fromkeys("│┃║", "|") | dict.fromkeys("╭╮╰╯┌┐└┘├┤┬┴┼╔╗╚╝", "+")
PATIENCE = 2.0  # seconds that a reader may take before text is dropped
PIECE = 512  # bytes: whatever is ready for some output takes that many


def open_streams() -> None:
    """Make sys.stdout and sys.stderr safe to write to, whatever the shell has done with them."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed: no socket or log may get this number, here or in a child: libraries write to it
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free is this one
    codecs.register_error("plain", _in_plain_characters)
    if sys.stdout is sys.__stdout__:  # else somebody reads along, and is no terminal
        sys.stdout = _safe(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _safe(sys.stderr, 2)


def _safe(stream: io.TextIOBase | None, number: int) -> io.TextIOWrapper:
    with contextlib.suppress(OSError, AttributeError):  # None when it was closed
        stream.flush()
    encoding = getattr(stream, "encoding", None) or "utf-8"
    return io.TextIOWrapper(io.BufferedWriter(Forgiving(number)), encoding, "plain", line_buffering=True)


def can_show(text: str) -> bool:
    """Whether standard output can show these characters as they are."""
    try:
        text.encode(sys.stdout.encoding or "utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _in_plain_characters(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    bad = error.object[error.start : error.end]
    return "".join(PLAIN.get(c) or c.encode("ascii", "backslashreplace").decode() for c in bad), error.end


class Forgiving(io.FileIO):
    """An open file descriptor to write to. It drops what can't be written: nobody reads, the disk is full, the terminal
    is gone or stands still."""

    def __init__(self, number: int) -> None:
        super().__init__(number, "w", closefd=False)
        self._patience = PATIENCE

    def write(self, data: memoryview | bytes) -> int:
        data = bytes(data)
        with contextlib.suppress(OSError, ValueError):  # ValueError: the descriptor is too large a number for select
            left = data
            while left:
                if not select.select([], [self], [], self._patience)[1]:
                    self._patience = 0.0  # until it reads again
                    break
                self._patience = PATIENCE
                left = left[super().write(left[:PIECE]) or 0 :]
        return len(data)
