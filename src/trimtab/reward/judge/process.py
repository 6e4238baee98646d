"""The process that judges: `main` is called with two descriptors (workers/process.py).

It is told the parts once, then any number of calls, and answers each when it is done, in whatever order. All of them run in one
event loop, which also says every second that it still turns: who hears nothing knows that something has blocked it.
"""

from __future__ import annotations

import asyncio
import pickle
import socket
import sys
from typing import Any

from trimtab.base.errors import RewardError
from trimtab.reward.judge import reward
from trimtab.reward.judge.client import JudgeCall, current
from trimtab.reward.load import Function, load
from trimtab.reward.worker import checked
from trimtab.workers.child import set_up
from trimtab.workers.messages import HEADER, Failure, WorkerAnswer
from trimtab.workers.user_code import one_line_error, user_traceback

TICK_S = 1.0


def main(channel_fd: str, trace_fd: str) -> None:
    asyncio.run(serve(set_up(int(channel_fd), int(trace_fd))))


async def serve(channel: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=channel)
    functions: list[Function] = []
    try:
        write(writer, await boot(await read(reader), functions))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(tick(writer))
            while True:
                tasks.create_task(respond(await read(reader), functions, writer))
    except* (EOFError, ConnectionError):
        pass  # the parent has closed the channel


async def read(reader: asyncio.StreamReader) -> Any:
    (size,) = HEADER.unpack(await reader.readexactly(HEADER.size))
    return pickle.loads(await reader.readexactly(size))


def write(writer: asyncio.StreamWriter, message: Any) -> None:
    data = pickle.dumps(message)
    writer.write(HEADER.pack(len(data)) + data)


async def tick(writer: asyncio.StreamWriter) -> None:
    while True:
        await asyncio.sleep(TICK_S)
        write(writer, None)


async def boot(message: Any, functions: list[Function]) -> list[frozenset[str]] | Failure:
    """Load every part, and where this is the run's first process try each endpoint; the answer says which columns each needs."""
    sys.path[:], parts, reward.run_dir, first = message
    try:
        functions += [load(source, args) for source, args, _ in parts]
        if first:
            for function, (_, _, limit_s) in zip(functions, parts):
                await reward.attempt(function.args, limit_s)
    except RewardError as error:
        return Failure("raised", str(error))
    return [function.needs for function in functions]


async def respond(message: Any, functions: list[Function], writer: asyncio.StreamWriter) -> None:
    number, part, count, limit_s, offered = message
    call = JudgeCall(limit_s)
    current.set(call)
    try:
        result = checked(await functions[part](offered), count)
    except Exception as error:
        result = Failure("raised", f"raised {one_line_error(error)}", user_traceback(error))
    write(writer, WorkerAnswer(number, result, call.slowest_s, call.tally))
