"""What is run, and on what."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from trace_serve.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """A training step's rollouts on one device; the defaults are the paper's step and one GB200.

    Attributes:
        trajectories: sequences of a training step.
        trajectory_tokens: tokens of each.
        batch: sequences decoded together.
        context: tokens of KV cache a sequence.
        memory_gb: device memory in GB (10^9 bytes).
        usable: share of it for weights, KV cache and state.
        bandwidth_gb_s: device memory bandwidth.
        link_gb_s: network bandwidth for hints.
        disk_gb_s: storage bandwidth for hints, reading while writing.
    """

    trajectories: int = 4096
    trajectory_tokens: int = 262_144
    batch: int = 256
    context: int = 32_768
    memory_gb: float = 186.0
    usable: float = 0.88
    bandwidth_gb_s: float = 8000.0
    link_gb_s: float = 300.0
    disk_gb_s: float = 5.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}: got {value}, expected a positive number", field=name)
        if self.usable > 1:
            raise ConfigError(f"usable: got {self.usable}, expected at most 1", field="usable")

    @property
    def step_tokens(self) -> int:
        return self.trajectories * self.trajectory_tokens

    @property
    def usable_bytes(self) -> float:
        return self.memory_gb * 1e9 * self.usable
