"""A pseudo-terminal for tests: a program writes to it, the test types and reads.

The end of the output is exact. Reading a master until it fails may lose output: where the program
has closed the last slave, a read may fail before everything that was written is delivered. So the
test keeps a slave open. When the program has ended, a mark is written to that slave, behind all
that the program wrote, and the reader reads to the mark."""

import codecs
import fcntl
import os
import pty
import secrets
import select
import signal
import struct
import subprocess
import termios
import threading

from conftest import HADAL
from serving import PATIENCE


def environment(**more):
    """A person's: of this process, with colour and a terminal that knows escapes."""
    return {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | {"TERM": "xterm"} | more


def with_signals():
    """What a shell in the background ignores, a program at a terminal does not."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)


class Terminal:
    """Runs a program with a terminal as its output, and as its input unless stdin is given."""

    def __init__(self, *command, columns=80, env=None, stdin=None):
        self.master, self.slave = pty.openpty()
        fcntl.ioctl(self.slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.before = termios.tcgetattr(self.slave)
        self.process = subprocess.Popen([*map(str, command)], stdin=self.slave if stdin is None else stdin, stdout=self.slave,
                                        stderr=self.slave, env=environment(**env or {}), start_new_session=True, preexec_fn=with_signals)
        self.mark = secrets.token_hex(16)
        self.seen, self.at, self.decoder = "", 0, codecs.getincrementaldecoder("utf-8")("replace")
        self.marker = threading.Thread(target=self.mark_end, daemon=True)
        self.marker.start()

    def mark_end(self):
        self.process.wait()
        os.write(self.slave, self.mark.encode())

    def is_over(self):
        return self.seen.endswith(self.mark)

    def read(self, wanted):
        assert select.select([self.master], [], [], PATIENCE)[0], f"never {wanted!r} behind {self.seen[self.at:]!r}"
        self.seen += self.decoder.decode(os.read(self.master, 65536))

    def wait_for(self, text):
        """Reads on until text comes, behind what was waited for before."""
        while text not in self.seen[self.at:]:
            assert not self.is_over(), f"ended without {text!r} behind {self.seen[self.at:]!r}"
            self.read(text)
        self.at = self.seen.index(text, self.at) + len(text)

    def type(self, text):
        os.write(self.master, text.encode())

    def close(self):
        """Reads all that comes until the program ends, and returns its exit code; a program may
        not leave a terminal changed."""
        while not self.is_over():
            self.read("its end")
        self.marker.join()
        self.seen = self.seen.removesuffix(self.mark)
        assert termios.tcgetattr(self.slave) == self.before
        os.close(self.master)
        os.close(self.slave)
        return self.process.returncode


def on_terminal(*words, columns=80, env=None, stdin=subprocess.DEVNULL):
    """What a terminal of so many columns gets from hadal, whole, with its escapes."""
    terminal = Terminal(HADAL, *words, columns=columns, env=env, stdin=stdin)
    assert terminal.close() == 0, terminal.seen
    return terminal.seen.replace("\r\n", "\n")
