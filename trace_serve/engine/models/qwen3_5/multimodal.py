"""SGLang's own classes, named so that they are found first."""

from sglang.srt.models.qwen3_5 import EntryClass

__all__ = ["EntryClass"]
