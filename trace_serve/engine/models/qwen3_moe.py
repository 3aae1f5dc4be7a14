"""SGLang's own class, named so that it is found first."""

from sglang.srt.models.qwen3_moe import EntryClass

__all__ = ["EntryClass"]
