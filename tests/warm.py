"""The program that forking.py puts in place of an interpreter: `python -IS warm.py SOCKET ARGUMENT...`.

It hands its arguments, folder, variables and open files to the server, passes signals on, and ends as the forked process does.
"""

import contextlib
import json
import os
import resource
import signal
import socket
import sys

MOST_FILES = 250
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


def is_open(number: int) -> bool:
    with contextlib.suppress(OSError):
        return bool(os.fstat(number))
    return False


def main(address: str, *arguments: str) -> None:
    fds = [number for number in range(MOST_FILES) if is_open(number)]
    link = socket.socket(socket.AF_UNIX)
    link.connect(address)
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: link.sendall(bytes([number])))
    asked = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ), "fds": fds}
    body = json.dumps(asked).encode()
    socket.send_fds(link, [len(body).to_bytes(8, "little")], fds)
    link.sendall(body)
    for number in fds:
        os.close(number)  # they are the process's: their end is its end
    status = int.from_bytes(link.recv(4) or b"\x01\x01", "little")
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


main(*sys.argv[1:])
