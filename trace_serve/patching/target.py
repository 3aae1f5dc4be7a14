"""Where SGLang is installed and where the patches lie, found without importing SGLang."""

from __future__ import annotations

import base64
import importlib.util
import sys
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path

from trace_serve.errors import PatchError

DISTRIBUTION = "sglang"


@dataclass(frozen=True)
class Target:
    """An installed SGLang.

    Attributes:
        root: the directory that holds the package directory `sglang`.
        distribution: its installed metadata.
    """

    root: Path
    distribution: metadata.Distribution

    @property
    def version(self) -> str:
        return self.distribution.version

    @cached_property
    def released_digests(self) -> dict[str, str]:
        """SHA-256 in hex of each file as the release's RECORD states it, by path relative to `root`."""
        digests = {}
        for file in self.distribution.files or ():
            if file.hash is not None and file.hash.mode == "sha256":
                digests[file.as_posix()] = base64.urlsafe_b64decode(file.hash.value + "=").hex()
        return digests

    def read(self, path: str) -> bytes | None:
        """The content of one file; None when it does not exist.

        Raises:
            PatchError: it exists and cannot be read as a file.
        """
        try:
            return (self.root / path).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise PatchError(
                f"{self.root / path}: cannot be read: {exc.strerror}; {self.remedy()}", field=path
            ) from exc

    def remedy(self) -> str:
        """How to get the released files back."""
        where = "" if Path(sys.prefix) in self.root.parents else f" --target {self.root}"
        return (
            f"reinstall it with `{sys.executable} -m pip install --force-reinstall --no-deps{where} "
            f"{DISTRIBUTION}=={self.version}`, then run `trace-serve patch apply`"
        )


def find_target(root: Path | None = None) -> Target:
    """The SGLang of this Python environment, or the one in another site-packages directory.

    Raises:
        PatchError: SGLang is not installed there.
    """
    if root is None:
        spec = importlib.util.find_spec(DISTRIBUTION)
        if spec is None or spec.origin is None:
            raise PatchError(
                f"sglang is not installed in {sys.prefix}; install it with `pip install 'trace-serve[engine]'`",
                field="target",
            )
        root = Path(spec.origin).parent.parent
        found = list(metadata.distributions(name=DISTRIBUTION))
    else:
        root = root.resolve()
        found = list(metadata.distributions(name=DISTRIBUTION, path=[str(root)]))
    if not found or not (root / DISTRIBUTION).is_dir():
        raise PatchError(
            f"{root}: no installed sglang there, expected a site-packages directory with sglang and its dist-info",
            field="target",
        )
    return Target(root=root, distribution=found[0])


def patch_dir() -> Path:
    """The directory of the shipped patches: inside an installed wheel, or `patches/` of the checkout.

    Raises:
        PatchError: neither is there.
    """
    package = Path(__file__).resolve().parent.parent
    for candidate in (package / "_patches", package.parent / "patches"):
        if candidate.is_dir():
            return candidate
    raise PatchError(f"{package}: the patches are missing; reinstall trace-serve", field="patches")
