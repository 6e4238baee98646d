"""Work in threads that do not keep the process from ending: a request that reads or computes for seconds ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

Result = TypeVar("Result")
Arguments = TypeVarTuple("Arguments")
MAX_THREADS = 8


class Threads:
    """Runs functions beside the event loop, so many at once; also those whose requests were given up count until they end."""

    def __init__(self, most: int = MAX_THREADS) -> None:
        self._room = asyncio.Semaphore(most)

    async def run(self, function: Callable[[*Arguments], Result], *args: *Arguments) -> Result:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Result] = loop.create_future()

        def tell(result: Result | None, error: BaseException | None) -> None:
            self._room.release()
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            result, failure = None, None
            try:
                result = function(*args)
            except BaseException as error:  # raised by whoever awaits it
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop has ended, and nobody waits any more
                loop.call_soon_threadsafe(tell, result, failure)

        await self._room.acquire()
        threading.Thread(target=work, name="trimtab serve", daemon=True).start()
        return await done
