"""SGLang's own class, named so that it is found first."""

from sglang.srt.models.olmoe import EntryClass

__all__ = ["EntryClass"]
