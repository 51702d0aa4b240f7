from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar, cast

import pytest
from starlette.types import Message, Scope

from gateway.api.body import ClientGone, ClientWatch, read_body
from gateway.api.client import ClientProtocol, client_of
from gateway.api.errors import ApiError

T = TypeVar("T")
GONE: Message = {"type": "http.disconnect"}


class Client:
    """ASGI's receive: what it was told to say, then silence, as of a client that waits."""

    def __init__(self, *messages: Message) -> None:
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        for message in messages:
            self._messages.put_nowait(message)

    async def receive(self) -> Message:
        return await self._messages.get()

    def leave(self) -> None:
        self._messages.put_nowait(GONE)


class Flow:
    resumed = 0

    def resume_reading(self) -> None:
        self.resumed += 1


class Connection:
    """The part of uvicorn's protocol that a watch listens to."""

    def __init__(self, lost: bool = False) -> None:
        self.gone: Callable[[], None] | None = None
        self.lost = lost
        self.flow = Flow()

    def leave(self) -> None:
        self.lost = True
        if self.gone is not None:
            self.gone()


class Watched:
    """A client that a watch learns of in one of the two ways there are."""

    def __init__(self, hooked: bool) -> None:
        self._client = Client()
        self.connection = Connection() if hooked else None

    def watch(self) -> ClientWatch:
        return ClientWatch(self._client.receive, cast(ClientProtocol | None, self.connection))

    def leave(self) -> None:
        if self.connection is None:
            self._client.leave()
        else:
            self.connection.leave()


HOOKED = pytest.mark.parametrize("hooked", [True, False], ids=["hooked", "plain ASGI"])


def run(main: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(main, 5))


def part(data: bytes, more: bool) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


def scope(*headers: tuple[bytes, bytes]) -> Scope:
    return {"type": "http", "headers": list(headers)}


def read(limit: int, *messages: Message, headers: tuple[tuple[bytes, bytes], ...] = ()) -> bytes:
    return run(read_body(scope(*headers), Client(*messages).receive, limit))


# --- the body


@pytest.mark.parametrize(
    "pieces", [[b""], [b"abc"], [b"a", b"bc"], [b"", b"abc", b""], [b"a", b"", b"b", b"c"]]
)
def test_a_body_is_read_whole(pieces: list[bytes]) -> None:
    messages = [part(p, i < len(pieces) - 1) for i, p in enumerate(pieces)]
    assert read(3, *messages) == b"".join(pieces)


def test_a_message_without_a_body_is_an_empty_one() -> None:
    assert read(3, {"type": "http.request"}) == b""


def test_an_announced_length_over_the_limit_is_refused_unread() -> None:
    with pytest.raises(ApiError) as raised:
        read(3, headers=((b"content-length", b"4"),))
    assert raised.value.status == 413
    assert read(3, part(b"abc", False), headers=((b"content-length", b"3"),)) == b"abc"


def test_a_body_that_grows_over_the_limit_is_refused_there() -> None:
    with pytest.raises(ApiError) as raised:
        read(3, part(b"ab", True), part(b"cd", True))
    assert raised.value.status == 413


@pytest.mark.parametrize("before", [[], [part(b"a", True)], [part(b"a", True), part(b"b", True)]])
def test_a_client_that_leaves_while_it_sends(before: list[Message]) -> None:
    with pytest.raises(ClientGone):
        read(10, *before, GONE)


# --- the watch


@HOOKED
def test_who_stays_is_not_noticed(hooked: bool) -> None:
    async def main() -> str:
        client = Watched(hooked)
        async with client.watch():
            await asyncio.sleep(0)
            result = "answered"
        client.leave()
        await asyncio.sleep(0)
        return result

    assert run(main()) == "answered"


async def in_a_queue() -> None:
    await asyncio.Queue[None]().get()


async def in_a_limit() -> None:
    async with asyncio.timeout(60):
        await asyncio.Event().wait()


async def in_a_thread_s_future() -> None:
    await asyncio.wrap_future(Future())


async def in_a_group() -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(asyncio.Event().wait())
        group.create_task(asyncio.Event().wait())


@HOOKED
@pytest.mark.parametrize("phase", [in_a_queue, in_a_limit, in_a_thread_s_future, in_a_group])
def test_who_leaves_ends_whatever_is_awaited(
    hooked: bool, phase: Callable[[], Awaitable[None]]
) -> None:
    async def main() -> list[str]:
        client = Watched(hooked)
        log: list[str] = []
        asyncio.get_running_loop().call_soon(client.leave)
        with pytest.raises(ClientGone):
            async with client.watch():
                try:
                    await phase()
                finally:
                    log.append("cleaned up")
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await asyncio.sleep(0)  # the task goes on as if it had never been cancelled
        return log

    assert run(main()) == ["cleaned up"]


@HOOKED
def test_clean_up_may_await(hooked: bool) -> None:
    async def main() -> list[str]:
        client = Watched(hooked)
        log = []
        asyncio.get_running_loop().call_soon(client.leave)
        with pytest.raises(ClientGone):
            async with client.watch():
                try:
                    await asyncio.Event().wait()
                finally:
                    await asyncio.sleep(0)
                    log.append("cleaned up")
        return log

    assert run(main()) == ["cleaned up"]


@HOOKED
def test_who_leaves_after_the_last_byte_is_no_loss(hooked: bool) -> None:
    async def main() -> str:
        client = Watched(hooked)
        async with client.watch() as watch:
            watch.stop()
            client.leave()
            for _ in range(5):
                await asyncio.sleep(0)
            return "answered"

    assert run(main()) == "answered"


def test_a_client_that_was_lost_before_it_was_watched() -> None:
    async def main() -> None:
        connection = cast(ClientProtocol, Connection(lost=True))
        async with ClientWatch(Client().receive, connection):
            raise AssertionError("nobody is there to answer")

    with pytest.raises(ClientGone):
        run(main())


def test_reading_goes_on_so_that_the_end_is_seen() -> None:
    async def main() -> int:
        client = Watched(hooked=True)
        assert client.connection is not None
        async with client.watch():
            return client.connection.flow.resumed

    assert run(main()) == 1


@HOOKED
def test_the_server_s_own_end_is_not_the_client_s(hooked: bool) -> None:
    async def served(client: Watched, started: asyncio.Event) -> None:
        async with client.watch():
            started.set()
            await asyncio.Event().wait()

    async def main(leaves_too: bool) -> None:
        client, started = Watched(hooked), asyncio.Event()
        task = asyncio.create_task(served(client, started))
        await started.wait()
        task.cancel()
        if leaves_too:
            client.leave()
        with pytest.raises(asyncio.CancelledError):
            await task

    run(main(leaves_too=False))
    run(main(leaves_too=True))


@HOOKED
def test_an_error_of_the_request_is_not_hidden(hooked: bool) -> None:
    async def main() -> None:
        client = Watched(hooked)
        async with client.watch():
            raise LookupError("of its own")

    with pytest.raises(LookupError):
        run(main())


@HOOKED
def test_an_answer_that_came_while_the_client_left_is_for_nobody(hooked: bool) -> None:
    async def main() -> None:
        client = Watched(hooked)
        answer = asyncio.get_running_loop().create_future()
        loop = asyncio.get_running_loop()
        loop.call_soon(answer.set_result, None)
        loop.call_soon(client.leave)
        try:
            async with client.watch():
                await answer
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        except ClientGone:
            pass
        task = asyncio.current_task()
        assert task is not None and task.cancelling() == 0
        await asyncio.sleep(0)

    run(main())


def test_no_watcher_is_left_behind() -> None:
    async def main() -> set[asyncio.Task[Any]]:
        client = Watched(hooked=False)
        async with client.watch():
            pass
        await asyncio.sleep(0)
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(main()) == set()


def test_a_server_of_another_kind_has_no_such_connection() -> None:
    assert client_of({"type": "http"}) is None
    assert client_of({"type": "http", "extensions": {}}) is None
