"""Settings come from options, then the environment, then defaults, and a bad one is named."""

from __future__ import annotations

import pytest

from trace_serve.errors import ConfigError
from trace_serve.settings import Settings


def test_an_option_wins_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_SERVE_PORT", "9000")
    assert Settings.load().port == 9000
    assert Settings.load(port=9001).port == 9001
    assert Settings.load(port=None).port == 9000


def test_production_is_the_default_mode() -> None:
    assert Settings.load().mode == "production"


def test_a_bad_option_is_named_as_an_option() -> None:
    with pytest.raises(ConfigError, match=r"--port: got 70000, .*65535") as caught:
        Settings.load(port=70000)
    assert (caught.value.field, caught.value.exit_code) == ("port", 3)


def test_a_bad_variable_is_named_as_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_SERVE_MAX_IN_FLIGHT", "0")
    with pytest.raises(ConfigError, match=r"TRACE_SERVE_MAX_IN_FLIGHT: got '0'"):
        Settings.load()


def test_a_key_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACE_SERVE_API_KEY", "secret")
    with pytest.raises(ConfigError) as caught:
        Settings.load()
    assert "secret" not in str(caught.value)
    assert "long-enough-key" not in repr(Settings.load(api_key="long-enough-key"))
