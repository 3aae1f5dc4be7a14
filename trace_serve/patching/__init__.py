"""Puts the patches on the installed SGLang and takes them off again, all or nothing, checked against a lock.

SGLang itself is never imported here. What the patches contain lives in `patches/`.
"""

from trace_serve.patching.operations import Outcome, apply, revert, write_lock
from trace_serve.patching.status import FileStatus, PatchStatus, Status, status
from trace_serve.patching.target import patch_dir

__all__ = [
    "FileStatus",
    "Outcome",
    "PatchStatus",
    "Status",
    "apply",
    "patch_dir",
    "revert",
    "status",
    "write_lock",
]
