"""A null upstream for bench_server.py: an OpenAI-style server that answers at once, to measure what is in front of it.

Parses no more of a request than it must. A stream of N tokens is one frame a write; `--interval-ms` puts time between
them, as an engine's decode steps do, else they follow each other by one turn of the event loop.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from typing import Any, cast

import uvloop

MODEL = "null-model"
CONTEXT_LENGTH = 4096
VOCAB_SIZE = 32000


def frame(data: str) -> bytes:
    text = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(text), text)


def chunk(delta: dict[str, Any], reason: str | None) -> bytes:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": None}
    head = {"id": "null-0", "object": "chat.completion.chunk", "created": 1767225600, "model": MODEL}
    return frame(json.dumps({**head, "choices": [choice], "usage": None}, separators=(",", ":")))


def stream_frames(tokens: int) -> list[bytes]:
    """The frames of one answer; the last one carries `[DONE]` and the end of the chunked body."""
    first = chunk({"role": "assistant", "content": ""}, None)
    middle = [chunk({"content": f" word{index}"}, None) for index in range(tokens)]
    return [first, *middle, chunk({}, "stop"), frame("[DONE]") + b"0\r\n\r\n"]


def answer(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s" % (len(data), data)


class Null(asyncio.Protocol):
    """One connection; requests on it are answered one after the other.

    Args:
        frames: of one stream.
        interval_s: time between frames; 0 is one turn of the event loop.
        report: what `/trace/report` says.
    """

    HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"

    def __init__(self, frames: list[bytes], interval_s: float, report: dict[str, Any]) -> None:
        self._frames = frames
        self._interval_s = interval_s
        self._loop = asyncio.get_running_loop()
        self._received = b""
        self._next = 0
        usage = {"prompt_tokens": 8, "completion_tokens": len(frames) - 3, "total_tokens": 5 + len(frames)}
        message = {"role": "assistant", "content": " word" * (len(frames) - 3)}
        choices = [{"index": 0, "message": message, "finish_reason": "stop"}]
        card = {"id": MODEL, "object": "model", "created": 0, "owned_by": "null", "max_model_len": CONTEXT_LENGTH}
        info = {"model_path": MODEL, "served_model_name": MODEL, "tokenizer_path": MODEL, "is_generation": True}
        self._answers = {
            b"/trace/heartbeat": answer({"age_s": 0.0, "limit_s": 20.0, "alive": True, "quarantined": False}),
            b"/trace/report": answer(report),
            b"/v1/models": answer({"object": "list", "data": [card]}),
            b"/model_info": answer(info),
            b"/get_model_info": answer(info),
            b"/server_info": answer({**info, "max_total_num_tokens": 1 << 20}),
            b"/get_server_info": answer({**info, "max_total_num_tokens": 1 << 20}),
        }
        self._whole = answer({"id": "null-0", "model": MODEL, "choices": choices, "usage": usage})

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = 0
        for line in head.split(b"\r\n")[1:]:
            name, _, value = line.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            elif name.lower() == b"expect":
                self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(rest) < length:
            return
        self._received = rest[length:]
        path = head.split(b" ", 2)[1].partition(b"?")[0]
        if not path.endswith(b"/completions"):
            self._transport.write(self._answers.get(path, answer({})))
        elif b'"stream":true' in rest.replace(b'"stream": true', b'"stream":true'):
            self._next = 0
            self._transport.write(self.HEAD)
            self._send()
        else:
            self._transport.write(self._whole)

    def _send(self) -> None:
        if self._transport.is_closing():
            return
        self._transport.write(self._frames[self._next])
        self._next += 1
        if self._next == len(self._frames):
            return
        if self._interval_s:
            self._loop.call_later(self._interval_s, self._send)
        else:
            self._loop.call_soon(self._send)


async def serve(options: argparse.Namespace) -> None:
    frames = stream_frames(options.tokens)
    report = json.loads(options.report)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(
        lambda: Null(frames, options.interval_ms / 1e3, report), "127.0.0.1", options.port, backlog=1024
    )
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    parser.add_argument("--report", default="{}", help="JSON of /trace/report")
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
