"""SGLang's own class, named so that it is found first."""

from sglang.srt.models.mixtral import EntryClass

__all__ = ["EntryClass"]
