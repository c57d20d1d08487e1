"""Python programs that need torch, each in a process of its own, forked from one that has imported it: an interpreter takes five
seconds to get there.

To signals, limits and its end such a process is one like any other. What is imported when is no test for it.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile

COMMAND = "import sys; from dtype_engine.cli import main; main()"
"""The program `dtype-engine`."""

_SERVER = """
import gc, json, os, socket, sys
import dtype_engine.runtime.export, dtype_engine.runtime.session
import torch, transformers
from transformers import AutoTokenizer, LlamaForCausalLM

gc.freeze()  # a child that ends would go through all of it, and copy its memory
requests = socket.socket(fileno=int(sys.argv[1]))
while True:
    request, outputs, *_ = socket.recv_fds(requests, 1 << 16, 2)
    if not request:
        sys.exit()
    child = os.fork()
    if child == 0:
        break
    for output in outputs:
        os.close(output)
    requests.send(b"%d\\n" % child)
    requests.send(b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
requests.close()
for number, output in enumerate(outputs, 1):
    os.dup2(output, number)
    os.close(output)
asked = json.loads(request)
os.chdir(asked["folder"])
os.environ.clear()
os.environ.update(asked["environment"])
sys.argv = ["-c", *asked["arguments"]]
exec(asked["code"], {"__name__": "__main__"})
"""


class Program:
    """`code` under way, as by `python -c`, with this process's folder and environment."""

    def __init__(self, code: str, *arguments: str) -> None:
        self._server = _server()[1]
        reading, writing = os.pipe()
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        request = {"code": code, "arguments": arguments, "folder": os.getcwd(), "environment": dict(os.environ)}
        socket.send_fds(self._server, [json.dumps(request).encode()], [writing, self._stderr.fileno()])
        os.close(writing)
        self.stdout = open(reading)  # noqa: SIM115
        self.pid = int(self._answer())

    def _answer(self) -> bytes:
        """A line of the server, which writes no more than one at a time that nobody has read."""
        line = b""
        while not line.endswith(b"\n"):
            byte = self._server.recv(1)
            assert byte, "the process that has imported torch is gone"
            line += byte
        return line

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def result(self) -> subprocess.CompletedProcess[str]:
        """Wait for its end; what it wrote that was not read yet."""
        stdout = self.stdout.read()
        status = int(self._answer())
        self.stdout.close()
        with self._stderr as file:
            file.seek(0)
            return subprocess.CompletedProcess((), status, stdout, file.read())


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `code` to its end."""
    return Program(code, *arguments).result()


@functools.cache
def _server() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        number = theirs.fileno()
        command = [sys.executable, "-c", _SERVER, str(number)]
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[number]), ours
