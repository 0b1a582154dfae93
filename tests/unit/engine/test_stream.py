"""The stream of a request: one buffer, read synchronously or asynchronously."""

from __future__ import annotations

import asyncio
import threading

import pytest

from kvist.engine.stream import RequestStream
from kvist.errors import EngineError
from kvist.types import FinishReason, OutputChunk

pytestmark = pytest.mark.timeout(20)


def chunk(text: str = "", index: int = 0, *, is_last: bool = False) -> OutputChunk:
    reason = FinishReason.STOP if is_last else None
    return OutputChunk(request_id="r", index=index, text=text, finish_reason=reason)


def read_sync(stream: RequestStream) -> list[OutputChunk]:
    return list(stream)


def read_async(stream: RequestStream) -> list[OutputChunk]:
    async def read() -> list[OutputChunk]:
        return [item async for item in stream]

    return asyncio.run(read())


READERS = pytest.mark.parametrize("read", [read_sync, read_async])


def make(num_sequences: int = 1) -> tuple[RequestStream, list[RequestStream]]:
    cancelled: list[RequestStream] = []
    return RequestStream("r", num_sequences, cancelled.append), cancelled


@READERS
def test_chunks_come_out_in_order_and_end_with_the_last_sequence(read):
    stream, _ = make(2)
    chunks = [chunk("a"), chunk("b", 1, is_last=True), chunk("c", is_last=True)]
    for item in chunks:
        stream.put(item)
    stream.put(chunk("after the end"))
    assert read(stream) == chunks
    assert read(stream) == []


@READERS
def test_reader_waits_for_another_thread(read):
    stream, _ = make()
    chunks = [chunk(str(i)) for i in range(50)] + [chunk(is_last=True)]
    thread = threading.Thread(target=lambda: [stream.put(item) for item in chunks])
    timer = threading.Timer(0.05, thread.start)
    timer.start()
    assert read(stream) == chunks
    timer.join()
    thread.join()


@READERS
def test_error_comes_after_the_chunks_before_it(read):
    stream, _ = make()
    stream.put(chunk("a"))
    stream.fail(EngineError("broken"))
    stream.fail(EngineError("second"))
    stream.put(chunk("b"))
    assert next(stream).text == "a"
    with pytest.raises(EngineError, match="broken"):
        read(stream)


def test_error_after_the_end_is_ignored():
    stream, _ = make()
    stream.put(chunk("a", is_last=True))
    stream.fail(EngineError("late"))
    assert len(list(stream)) == 1


def test_cancel_asks_once_the_request_runs_and_never_after_its_end():
    stream, cancelled = make()
    stream.cancel()
    assert cancelled == [stream]
    stream.put(chunk(is_last=True))
    stream.cancel()
    assert cancelled == [stream]


def test_leaving_the_block_cancels():
    stream, cancelled = make()
    with stream:
        pass
    assert cancelled == [stream]


def test_leaving_the_async_block_cancels():
    stream, cancelled = make()

    async def leave() -> None:
        async with stream:
            pass

    asyncio.run(leave())
    assert cancelled == [stream]


def test_cancelled_async_reader_does_not_disturb_the_next_one():
    stream, _ = make()

    async def scenario() -> list[OutputChunk]:
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
        stream.put(chunk("a", is_last=True))
        return [item async for item in stream]

    assert [item.text for item in asyncio.run(scenario())] == ["a"]


def test_closed_event_loop_of_a_reader_does_not_disturb_the_engine():
    stream, _ = make()

    async def give_up() -> None:
        task = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        del task

    loop = asyncio.new_event_loop()
    task = loop.create_task(give_up())
    loop.run_until_complete(task)
    for pending in asyncio.all_tasks(loop):
        pending.cancel()
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    stream.put(chunk("a", is_last=True))
    assert next(stream).text == "a"
