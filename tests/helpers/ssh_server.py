"""A real `sshd` on this machine's loopback, with keys, a configuration and a port of its own, behind a slow line."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.helpers import slow_line

_SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
_SSH, _KEYGEN = shutil.which("ssh"), shutil.which("ssh-keygen")
IS_THERE = bool(_SSHD and _SSH and _KEYGEN)
HOST = "far"
"""What the client calls it."""
# What nc does, where there is none.
_JOIN = """
import os, socket, sys, threading
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
def up():
    while data := os.read(0, 1 << 16):
        there.sendall(data)
    there.shutdown(socket.SHUT_WR)
threading.Thread(target=up, daemon=True).start()
while data := there.recv(1 << 16):
    os.write(1, data)
os._exit(0)
"""


@contextlib.contextmanager
def running(folder: Path, seconds: float) -> Iterator[dict[str, str]]:
    """The server, until this ends: variables with which `ssh far` leads to it, over a line that takes so long each way and notes
    in `folder` what it carries (see `slow_line`).
    """
    assert _SSHD is not None
    assert _KEYGEN is not None
    for key in ("host_key", "user_key"):
        subprocess.run([_KEYGEN, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True)
    (folder / "known_hosts").write_text(f"{HOST} {(folder / 'host_key.pub').read_text()}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "sshd_config").write_text(f"""
ListenAddress 127.0.0.1:{port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
AuthenticationMethods publickey
PermitRootLogin prohibit-password
SetEnv PATH={Path(sys.executable).parent}:/usr/bin:/bin XDG_STATE_HOME={folder}/state HF_HUB_CACHE=/nowhere
""")
    (folder / "join.py").write_text(_JOIN)
    slow = f"{sys.executable} {slow_line.__file__} {folder} {seconds} {sys.executable} {folder}/join.py {port}"
    (folder / "ssh_config").write_text(f"""
Host {HOST}
User {getpass.getuser()}
IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
StrictHostKeyChecking yes
ProxyCommand {slow}
""")
    (folder / "bin").mkdir()
    ssh = folder / "bin" / "ssh"
    # What keeps a line alive would be counted, too.
    ssh.write_text(f'#!/bin/sh\nexec {_SSH} -F {folder}/ssh_config -o ServerAliveInterval=0 "$@"\n')
    ssh.chmod(0o755)
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # it does not start without
    with open(folder / "sshd.log", "w") as log:
        server = subprocess.Popen([_SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log)
    try:
        until = time.monotonic() + 30
        while not _listens(port):
            assert server.poll() is None, (folder / "sshd.log").read_text()
            assert time.monotonic() < until
            time.sleep(0.05)
        yield {"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    finally:
        server.terminate()
        server.wait()


def _listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0
