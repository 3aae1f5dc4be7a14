"""`trace-serve hints pack` and `unpack`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_serve.errors import HintFormatError
from trace_serve.hints import wire
from trace_serve.hints.syndrome import code, packed
from trace_serve.hints.syndrome.more import beside

_Out = Annotated[Path, typer.Option(help="File to write.")]


def pack_command(
    file: Annotated[Path, typer.Argument(help="Hint file (.safetensors).")],
    out: _Out,
    words: Annotated[
        int, typer.Option(min=code.MIN_WORDS, max=code.MAX_WORDS, help="64-bit words of syndrome for 2,048 values.")
    ] = packed.WORDS,
) -> None:
    """Experimental: replace lowest bits by syndromes, which a trainer decodes with its own values.

    Writes OUT and beside it OUT.more.safetensors, of which a trainer reads only the blocks that it cannot decode.
    """
    hints = wire.read(file)
    first, second = packed.pack(hints, scale=hints.sites[0].scale_kind if hints.sites else "lsb", words=words)
    # The second file first: whoever finds the packed file finds what it may need.
    wire.write_bytes(beside(out), second)
    wire.write_bytes(out, first)
    typer.echo(f"{out}: {len(first):,} B, {beside(out).name}: {len(second):,} B, from {file.stat().st_size:,} B")


def unpack_command(file: Annotated[Path, typer.Argument(help="Packed hint file.")], out: _Out) -> None:
    """Put the bits back, all of them from the second file."""
    hints = wire.read(file)
    if not isinstance(hints, packed.PackedHints):
        raise HintFormatError(f"{file}: is not packed, expected a file that `hints pack` wrote", field="file")
    wire.write(out, packed.unpack(hints), scale=hints.sites[0].scale_kind)
    typer.echo(f"{out}: ok")
