"""The screen of `nri-gpu status --watch`: it scrolls and filters, and leaves the terminal as it was."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
import termios
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from typing import Final

from nri_gpu.cli import terminal
from nri_gpu.cli.page import Line, Page, Tone, filtered

PARENT_S: Final = 1.0  # between two looks whether the parent lives
READ_BYTES: Final = 1024
# xterm's: a screen of its own without a cursor, and back; the top left corner; the rest of a line, and of the screen.
ENTER, LEAVE, HOME, LINE_END, SCREEN_END = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l", "\x1b[H", "\x1b[K", "\x1b[J"
KEYS_LINE: Final = "q ends, / filters, arrows, PgUp, PgDn, Home, End scroll"
NO_KEYS_LINE: Final = "standard input is no terminal, so that no key works but Ctrl-C, which ends it"
ENDS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
KEY: Final = re.compile(rb"\x1b(?:\[[0-9;]*[@-~]|O[@-~])|[\xc2-\xf4][\x80-\xbf]+|.", re.DOTALL)


class Move(StrEnum):
    """A key that scrolls."""

    UP = "up"
    DOWN = "down"
    PAGE_UP = "page up"
    PAGE_DOWN = "page down"
    HOME = "home"
    END = "end"


MOVES: Final[Mapping[bytes, Move]] = {
    **dict.fromkeys((b"\x1b[A", b"\x1bOA", b"k"), Move.UP),
    **dict.fromkeys((b"\x1b[B", b"\x1bOB", b"j"), Move.DOWN),
    **dict.fromkeys((b"\x1b[5~", b"b"), Move.PAGE_UP),
    **dict.fromkeys((b"\x1b[6~", b" "), Move.PAGE_DOWN),
    **dict.fromkeys((b"\x1b[H", b"\x1bOH", b"\x1b[1~", b"\x1b[7~", b"g"), Move.HOME),
    **dict.fromkeys((b"\x1b[F", b"\x1bOF", b"\x1b[4~", b"\x1b[8~", b"G"), Move.END),
}
ESCAPE, ENTER_KEYS, ERASE_KEYS = b"\x1b", (b"\r", b"\n"), (b"\x7f", b"\x08")


class Scroller:
    """The part of a page that is shown: from which line on, and by which words it is filtered."""

    def __init__(self) -> None:
        self.top = 0
        self.words = ""
        self.typing = False  # the words are being typed

    def press(self, key: bytes, lines: int, rows: int) -> bool:
        """Do what a key asks for. Return whether it asks for the end. lines: of the page; rows: of the screen."""
        if self.typing:
            self._type(key)
        elif key in MOVES:
            steps = {Move.UP: -1, Move.DOWN: 1, Move.PAGE_UP: -rows, Move.PAGE_DOWN: rows, Move.HOME: -lines}
            self.top = self.kept(self.top + steps.get(MOVES[key], lines), lines, rows)
        elif key == b"/":
            self.typing, self.words = True, ""
        elif key == ESCAPE:
            self.words = ""
        return key == b"q" and not self.typing

    @staticmethod
    def kept(top: int, lines: int, rows: int) -> int:
        """Return the line to begin with so that the screen is full."""
        return max(0, min(top, lines - rows))

    def _type(self, key: bytes) -> None:
        if key in ENTER_KEYS or key == ESCAPE:
            self.typing = False
            self.words *= key != ESCAPE
        elif key in ERASE_KEYS:
            self.words = self.words[:-1]
        elif (letter := key.decode(errors="replace")).isprintable():
            self.words += letter
        self.top = 0

    def footer(self, lines: int, rows: int, *, keys: bool) -> str:
        """Return the last line of the screen."""
        if self.typing:
            return f"/{self.words}  (Enter keeps it, Esc ends it)"
        place = f"lines {self.top + 1} to {min(self.top + rows, lines)} of {lines}; " if lines > rows else ""
        by = f"filtered by {self.words!r}, Esc ends that; " if self.words else ""
        return f"{by}{place}{KEYS_LINE if keys else NO_KEYS_LINE}"


class LiveScreen:
    """The terminal while pages are shown on it."""

    def __init__(self) -> None:
        self._console = terminal.new_console()
        self._keys = sys.stdin.fileno() if sys.stdin is not None and sys.stdin.isatty() else None
        self._scroller = Scroller()
        self._page: Page = ()
        self._painted: list[str] = []
        self._painted_of: Page | None = None
        self._painted_as = ("", 0)  # words and width
        self._fault: BaseException | None = None
        self._woken, self._wake = os.pipe()
        self._parent = os.getppid()
        self._modes: list[int | list[bytes | int]] | None = None
        for each in (self._woken, self._wake):
            os.set_blocking(each, False)

    def show(self, pages: Iterable[Page]) -> None:
        """Show each page as it comes, until a key or a signal ends it, or the parent or the terminal is gone.

        Raises: whatever `pages` raises.
        """
        threading.Thread(target=self._take, args=(iter(pages),), name="nri-gpu-pages", daemon=True).start()
        with self._signals():
            self._enter()
            try:
                while self._step():
                    pass
            except OSError:  # the terminal is gone
                pass
            finally:
                with suppress(OSError, termios.error):
                    self._leave()
        if self._fault:
            raise self._fault

    def _take(self, pages: Iterator[Page]) -> None:
        """Wait for pages, in a thread of its own, since a daemon that hangs must not stop a key."""
        try:
            for self._page in pages:
                self._tell(0)
        except BaseException as fault:
            self._fault = fault
            self._tell(0)

    def _tell(self, number: int) -> None:
        with suppress(BlockingIOError):
            os.write(self._wake, bytes([number]))

    def _step(self) -> bool:
        """Draw, wait for something, and do it. Return whether to go on. Raises: OSError, if the terminal is gone."""
        lines, rows = self._draw()
        watched = [self._woken, *([] if self._keys is None else [self._keys])]
        ready, _, _ = select.select(watched, [], [], PARENT_S)
        if self._woken in ready and not self._after(frozenset(os.read(self._woken, READ_BYTES))):
            return False
        if self._keys in ready:
            pressed = os.read(self._keys, READ_BYTES)
            if not pressed or any(self._scroller.press(key, lines, rows) for key in KEY.findall(pressed)):
                return False
        return self._fault is None and os.getppid() == self._parent

    def _after(self, told: frozenset[int]) -> bool:
        """Do what signals ask for, by their numbers. Return whether to go on."""
        if told & ENDS:
            return False
        if signal.SIGTSTP in told:
            self._leave()
            signal.signal(signal.SIGTSTP, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTSTP)  # stops here until SIGCONT
            signal.signal(signal.SIGTSTP, _only_told)
            self._enter()
        return True

    def _draw(self) -> tuple[int, int]:
        """Draw the screen. Return the lines of the page, and the rows that they have."""
        width, height = self._console.size
        rows = max(height - 1, 1)
        lines = self._lines(self._page, self._scroller.words, width)
        top = self._scroller.top = Scroller.kept(self._scroller.top, len(lines), rows)
        footer = self._scroller.footer(len(lines), rows, keys=self._keys is not None)
        shown = lines[top : top + rows]
        shown += [""] * (rows - len(shown)) + terminal.painted([Line(footer[:width], Tone.FAINT)], self._console)[:1]
        self._write(HOME + "\n".join(f"{line}{LINE_END}" for line in shown[:height]) + SCREEN_END)
        return len(lines), rows

    def _lines(self, page: Page, words: str, width: int) -> list[str]:
        """Return the lines of the page. A key that scrolls does not wait until they are made again."""
        if self._painted_of is not page or self._painted_as != (words, width):
            self._painted = terminal.painted(filtered(page, words) if words else page, self._console)
            self._painted_of, self._painted_as = page, (words, width)
        return self._painted

    def _enter(self) -> None:
        if self._keys is not None:
            self._modes = termios.tcgetattr(self._keys)
            raw = [*self._modes]
            raw[3] &= ~(termios.ICANON | termios.ECHO)  # type: ignore[operator] # the local modes, a number
            termios.tcsetattr(self._keys, termios.TCSADRAIN, raw)
        self._write(ENTER)

    def _leave(self) -> None:
        if self._keys is not None and self._modes is not None:
            termios.tcsetattr(self._keys, termios.TCSADRAIN, self._modes)
        self._write(LEAVE)

    def _write(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Have signals only tell their numbers, so that none comes in the middle of a drawing."""
        asked = (*ENDS, signal.SIGTSTP, signal.SIGWINCH, signal.SIGCONT)
        before = {each: signal.signal(each, _only_told) for each in asked}
        descriptor = signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(descriptor)
            for number, handler in before.items():
                signal.signal(number, handler)


def _only_told(*_: object) -> None:
    """Leave a signal to the descriptor that has its number."""
