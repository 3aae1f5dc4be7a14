"""What one update session has received, and whether that is a whole update."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from trace_serve.engine.refit.manifest import Manifest

_SHOWN = 3


@dataclass
class Session:
    """Attributes:
    selector: runners it applies to, as SGLang names them.
    received: names of the tensors that were loaded.
    refused: names that were refused and not sent again, with the reason.
    lost: why a bucket was refused whose names are not known.
    broken: why a bucket could not be loaded after it had been accepted.
    touched: at least one weight may have been written.
    label: the trainer's name for the version, the last one given.
    last: when the trainer was last heard, `time.monotonic()`.
    """

    selector: str
    received: set[str] = field(default_factory=set)
    refused: dict[str, str] = field(default_factory=dict)
    lost: str | None = None
    broken: str | None = None
    touched: bool = False
    label: str | None = None
    last: float = field(default_factory=time.monotonic)

    def heard(self) -> None:
        self.last = time.monotonic()

    def idle_s(self) -> float:
        return time.monotonic() - self.last

    def accept(self, names: Iterable[str]) -> None:
        for name in names:
            self.received.add(name)
            self.refused.pop(name, None)

    def refuse(self, names: Iterable[str], reason: str) -> None:
        known = list(names)
        self.refused.update(dict.fromkeys(known, reason))
        if not known:
            self.lost = reason

    def fault(self, manifest: Manifest, *, partial: bool) -> str | None:
        """Why this is not a whole update; None when it is.

        Args:
            manifest: of the model.
            partial: an update may leave tensors out, as long as halves of one expert's projection come together.
        """
        if self.broken is not None:
            return self.broken
        if self.refused:
            reason = next(iter(self.refused.values()))
            return f"{len(self.refused)} tensors were refused and not sent again: {reason}"
        missing = manifest.missing(self.received)
        if not missing:
            return None
        if self.lost is not None:
            return f"a bucket was refused ({self.lost}) and {len(missing)} tensors were never received"
        if not partial:
            shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
            return (
                f"{len(missing)} of {len(manifest.tensors)} tensors were never received ({shown}); send all of them, "
                "or start the engine with partial_refit if the others are not trained"
            )
        half = manifest.unpaired(self.received)
        if half is not None:
            return f"tensor {half!r} came without its other half, with which it shares a global scale; send both"
        return None
