"""Hostile bytes at every entry point: they are read or refused with the project's own error, in little memory.

`HINT_FUZZ_EXAMPLES=50000` makes a campaign of it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hint_factory import make_file, same
from hint_mutations import HOSTILE_JSON, HOSTILE_TEXT, hostile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trace_serve.errors import HintFormatError
from trace_serve.hints import container, merge, wire
from trace_serve.hints.compression import compress, decompress
from trace_serve.hints.reader import HintReader
from trace_serve.hints.sinks.shared import read_segment
from trace_serve.hints.syndrome import packed
from trace_serve.hints.syndrome.more import beside
from trace_serve.hints.writer import HintWriter

EXAMPLES = int(os.environ.get("HINT_FUZZ_EXAMPLES", "60"))
FUZZ = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture],
)
WHOLE = wire.to_bytes(make_file(37), scale="byte")
PLAIN = make_file(37, sites=make_file(37).sites[:2])
PACKED, MORE = packed.pack(PLAIN)
MOST = 48 << 20
"""Bytes: some JSON of 100,000 levels, many times a file of 30 KB, and far below what a header may claim."""


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < MOST
    finally:
        tracemalloc.stop()


def attempt(read: Callable[[], object]) -> bool:
    """Whether it was read; any error but the project's own comes out."""
    with little_memory():
        try:
            read()
        except HintFormatError:
            return False
        return True


def read_in_parts(path: Path) -> None:
    with HintReader(path) as reader:
        for _ in reader.parts(16):
            pass
        for scale in ("byte", "lsb", "none"):
            with HintWriter(path.with_suffix(".copy"), reader.total, scale=scale) as writer:
                for part in reader.parts(16):
                    writer.append(part)


@FUZZ
@given(data=hostile(WHOLE))
def test_files(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "h.safetensors"
    path.write_bytes(data)
    whole = attempt(lambda: wire.read(path))
    with little_memory():
        try:
            with HintReader(path) as reader:
                list(reader.parts(16))
            in_parts = True
        except HintFormatError:
            in_parts = False
    assert whole == in_parts
    if whole:
        attempt(lambda: read_in_parts(path))
        attempt(lambda: merge.merge({"a": path}, tmp_path / hashlib.sha256(data).hexdigest()))


def merged(directory: Path) -> list[str]:
    """A directory with two parts of one trajectory, and their names."""
    plain = make_file(37)
    path = directory.with_suffix(".safetensors")
    wire.write(path, plain, scale="byte")
    merge.merge({"t0": path}, directory)
    with HintReader(path) as reader:
        parts = [wire.to_bytes(reader.rows(0, 20), scale="byte"), wire.to_bytes(reader.rows(20, 37), scale="byte")]
    names = []
    for part in parts:
        names.append(hashlib.sha256(part).hexdigest())
        (directory / merge.PARTS / f"{names[-1]}.safetensors").write_bytes(part)
    return names


@FUZZ
@given(data=st.data())
def test_merged_directories(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    directory = tmp_path_factory.mktemp("fuzz") / "merged"
    names = merged(directory)
    index: Any = {"schema_version": 1, "trajectories": {"t0": names}}
    kind = data.draw(st.sampled_from(["part", "value", "text", "names", "order", "bytes"]))
    if kind == "part":
        which = data.draw(st.integers(0, 1))
        damaged = data.draw(hostile((directory / merge.PARTS / f"{names[which]}.safetensors").read_bytes()))
        index["trajectories"]["t0"] = [*names]
        index["trajectories"]["t0"][which] = hashlib.sha256(damaged).hexdigest()
        (directory / merge.PARTS / f"{index['trajectories']['t0'][which]}.safetensors").write_bytes(damaged)
    elif kind == "value":
        index[data.draw(st.sampled_from(sorted(index)))] = data.draw(st.sampled_from(HOSTILE_JSON))
    elif kind == "names":
        index["trajectories"] = {"t0": data.draw(st.sampled_from([*HOSTILE_JSON, ["../index"], ["..", "/etc/passwd"]]))}
    elif kind == "order":
        index["trajectories"]["t0"] = data.draw(st.lists(st.sampled_from(names), max_size=4))
    text = json.dumps(index)
    if kind == "text":
        text = data.draw(st.sampled_from([*HOSTILE_TEXT, text + "x", text[:-1], f'{{"schema_version":1,{text[1:]}']))
    raw = text.encode("utf-8", "surrogatepass")
    if kind == "bytes":
        at = data.draw(st.integers(0, len(raw) - 1))
        raw = raw[:at] + data.draw(st.binary(max_size=3)) + raw[at + 1 :]
    (directory / merge.INDEX).write_bytes(raw)
    out = directory / "out"
    if not attempt(lambda: merge.trajectory(directory, "t0", out)):
        assert not out.exists()
        assert not list(directory.glob(".out*"))
    attempt(lambda: merge.names(directory))


@FUZZ
@given(data=st.data())
def test_compressed_files(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "h.safetensors.zst"
    squeezed = compress(WHOLE)
    kind = data.draw(st.sampled_from(["flip", "cut", "behind", "inside"]))
    at = data.draw(st.integers(0, len(squeezed) - 1))
    if kind == "flip":
        squeezed = squeezed[:at] + bytes([squeezed[at] ^ data.draw(st.integers(1, 255))]) + squeezed[at + 1 :]
    elif kind == "cut":
        squeezed = squeezed[:at]
    elif kind == "behind":
        squeezed += data.draw(st.binary(min_size=1, max_size=30))
    else:
        squeezed = compress(data.draw(hostile(WHOLE)))
    path.write_bytes(squeezed)
    read = attempt(lambda: wire.read(path, max_bytes=1 << 20))
    assert not (read and kind in ("cut", "behind"))


def test_a_frame_that_claims_much_more_than_it_holds_takes_no_memory() -> None:
    squeezed = bytearray(zstandard.ZstdCompressor().compress(b"abc" * 100))
    # RFC 8878, 3.1.1.1: a frame header with 8 bytes of content size and no window.
    claim = struct.pack("<IBQ", 0xFD2FB528, 0b11100000, 10 << 30)
    body = squeezed[4 + 1 + 2 :]
    assert zstandard.frame_content_size(claim + bytes(body)) == 10 << 30
    assert not attempt(lambda: decompress(claim + bytes(body)))


def test_two_frames_and_a_bomb_are_refused() -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(256 << 20))
    assert len(bomb) < 64 << 10
    assert not attempt(lambda: decompress(bomb, max_bytes=1 << 20))
    assert not attempt(lambda: decompress(compress(WHOLE) + compress(WHOLE)))
    assert not attempt(lambda: decompress(compress(WHOLE) + bomb))


@FUZZ
@given(data=hostile(PACKED), more=hostile(MORE))
def test_packed_files(tmp_path: Path, data: bytes, more: bytes) -> None:
    path = tmp_path / "h.safetensors"
    path.write_bytes(data)
    attempt(lambda: wire.read(path))
    path.write_bytes(PACKED)
    beside(path).write_bytes(more)

    def unpack() -> None:
        hints = wire.read(path)
        assert isinstance(hints, packed.PackedHints)
        assert same(packed.unpack(hints), PLAIN)

    attempt(unpack)
    beside(path).unlink()


@FUZZ
@given(data=st.data())
def test_segments_of_shared_memory(tmp_path: Path, data: st.DataObject) -> None:
    header = bytearray(struct.pack("<8sB7xQ32s", b"TRHINTS1", 0, len(WHOLE), hashlib.sha256(WHOLE).digest()))
    segment = bytes(header) + WHOLE
    kind = data.draw(st.sampled_from(["flip", "cut", "length", "hints"]))
    if kind == "flip":
        at = data.draw(st.integers(0, len(header) + 40))
        segment = segment[:at] + bytes([segment[at] ^ data.draw(st.integers(1, 255))]) + segment[at + 1 :]
    elif kind == "cut":
        segment = segment[: data.draw(st.integers(0, len(segment) - 1))]
    elif kind == "length":
        length = data.draw(st.sampled_from([0, len(WHOLE) - 1, len(WHOLE) + 1, 2**63, 2**64 - 1]))
        segment = segment[:16] + struct.pack("<Q", length) + segment[24:]
    else:
        inside = data.draw(hostile(WHOLE))
        segment = struct.pack("<8sB7xQ32s", b"TRHINTS1", 0, len(inside), hashlib.sha256(inside).digest()) + inside
    path = tmp_path / "segment.hints"
    path.write_bytes(segment)
    read = attempt(lambda: wire.from_bytes(read_segment(path)))
    # The state and the padding are nobody's payload.
    assert not (read and kind in ("cut", "length"))


def test_a_file_whose_sites_keep_their_scales_differently_is_not_merged(tmp_path: Path) -> None:
    """One choice a file is all that the writer has; taking the first would drop bits of the others."""
    arrays, metadata = container.decode(WHOLE)
    sites = json.loads(metadata["sites"])
    sites["v"]["scale"] = "none"
    del arrays["v.scale"]
    path = tmp_path / "h.safetensors"
    path.write_bytes(container.encode(arrays, {**metadata, "sites": container.canonical(sites)}))
    wire.read(path)
    with pytest.raises(HintFormatError, match="byte and none"):
        merge.merge({"a": path}, tmp_path / "merged")
