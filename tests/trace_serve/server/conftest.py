from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest
from harness import Running


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One front-end over the scripted engine, shared by tests that leave both as they were."""
    with Running(tmp_path_factory.mktemp("front-end"), api_key="a-client-key") as running:
        yield running


@pytest.fixture
def client(shared: Running) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {shared.api_key}"}
    with httpx.Client(base_url=shared.url, headers=headers, timeout=20) as client:
        yield client
