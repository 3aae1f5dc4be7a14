"""Every environment variable and every default of the server, in one place.

A value comes from, in this order: the command line, an environment variable `TRACE_SERVE_<NAME>`, the default here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from trace_serve.errors import ConfigError
from trace_serve.hints.options import HintOptions, from_settings

_CPU_KV_TOKENS = 16384

Mode = Literal["rollout", "production"]


class Settings(BaseSettings):
    """Configuration of one front-end and the one engine it supervises. Durations are seconds, sizes are bytes."""

    model_config = SettingsConfigDict(env_prefix="TRACE_SERVE_", extra="ignore", frozen=True)

    mode: Mode = Field("production", description="production needs a passing signed verdict, rollout does not")
    host: str = Field("127.0.0.1", min_length=1, description="address to listen on")
    port: int = Field(8080, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    api_key: SecretStr | None = Field(None, min_length=8, description="bearer key that clients must send")
    key_file: Path | None = Field(
        None, description="API keys, made with `trace-serve keys`; readable by its owner only"
    )
    metrics_need_key: bool = Field(False, description="/metrics needs a key with the scope metrics")
    cors_origins: str = Field(
        "", description="web origins that may call the server, separated by commas; none by default"
    )
    allowed_hosts: str = Field(
        "", description="further Host headers that a server on loopback without keys answers to, separated by commas"
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with tls_key the port speaks TLS only")
    tls_key: Path | None = Field(None, description="PEM private key, readable by its owner only")
    tls_client_ca: Path | None = Field(
        None, description="PEM certificates that must have signed a client's certificate"
    )
    verdict: Path | None = Field(
        None, description="signed verdict; default: <policy>.verdict.dsse.json beside the policy"
    )
    public_key: Path | None = Field(None, description="pinned public key (PEM) that the verdict must verify against")
    hint_dir: Path | None = Field(
        None, description="where the engine writes hint files; rollout mode makes a temporary one, production has none"
    )
    hint_sites: str = Field("experts_in,k,v", description="sites the engine keeps, separated by commas")
    hint_layers: str = Field("all", description="layers whose hints are kept: all, deeper-half, or indices as in 3,4,5")
    hint_codes: str = Field("lsb", description="the lowest bits of codes, or whole codes for a full replay: lsb, full")
    hint_scale: str = Field("lsb", description="how much of a block scale hints carry: lsb, byte or none")
    hint_ttl_s: float | None = Field(86400.0, gt=0, description="age at which a hint file is removed")
    hint_dir_max_bytes: int | None = Field(
        1 << 36, ge=1 << 20, description="the oldest hint files are removed while all of them are larger than this"
    )
    registry: Path | None = Field(None, description="directory of policies that the admin API may activate")
    state_dir: Path | None = Field(
        None, description="audit log, digests and shadow answers; default: .trace-serve in the registry"
    )
    admin_port: int | None = Field(None, ge=0, le=65535, description="port of the admin API; without it there is none")
    admin_host: str = Field("127.0.0.1", min_length=1, description="address of the admin API")
    admin_key: SecretStr | None = Field(None, min_length=16, description="bearer key of the admin API")
    web_pages: bool = Field(True, description="serve the page that tries the policy at / and the API's at /docs")
    rollout_max_count: int = Field(1024, ge=1, le=1 << 20, description="records of recent rollouts that are kept")
    rollout_max_bytes: int = Field(1 << 28, ge=1 << 16, le=1 << 40, description="of all rollout records together")
    rollout_ttl_s: float = Field(3600.0, gt=0, description="age at which a rollout record is removed")
    tool_call_parser: str | None = Field(
        None,
        pattern=r"^[a-z0-9_-]+$",
        description="SGLang's parser of the model's tool calls (qwen, llama3, ...); without one tools are refused",
    )
    engine_urls: str = Field(
        "", description="engines that somebody else runs, separated by commas; none is started then"
    )
    engine_key_file: Path | None = Field(
        None, description="bearer key of these engines: one for all, or one a line for each in turn"
    )
    engine_unverified: bool = Field(
        False, description="in rollout mode, serve engines that do not report which weights they hold"
    )
    engine_log: Path | None = Field(None, description="file for the engine's output")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = Field("json", description="how log lines are written to standard error")
    engine_metrics: bool = Field(True, description="start the engine with its own metrics and show them on /metrics")
    otel_endpoint: str | None = Field(
        None, pattern=r"^https?://[^\s]+$", description="base URL of an OTLP/HTTP collector; default: OTEL_ variables"
    )
    request_log: Path | None = Field(None, description="file of requests and answers that eval-gate can replay")
    request_log_redact: str | None = Field(
        None, min_length=1, description="presidio, module:function, or none to write texts as they are"
    )
    request_log_share: float = Field(1.0, gt=0, le=1, description="share of conversations that are recorded")
    request_log_max_bytes: int = Field(
        1 << 28,
        ge=4096,
        le=1 << 30,
        description="size at which the request log is rotated; the gate reads 1 GiB at most",
    )
    request_log_files: int = Field(5, ge=1, le=1000, description="files of the request log that are kept")
    request_log_queue: int = Field(4096, ge=1, le=1 << 20, description="records that may wait to be written")

    max_body_bytes: int = Field(4 << 20, ge=1024, le=1 << 30, description="larger request bodies are refused with 413")
    head_timeout_s: float = Field(10.0, gt=0, le=3600, description="time a client has to send its headers")
    body_timeout_s: float = Field(30.0, gt=0, le=3600, description="time a client has to send its request body")
    client_stall_s: float = Field(60.0, gt=0, le=3600, description="a client that reads nothing this long is dropped")
    upstream_idle_s: float = Field(600.0, gt=0, le=86400, description="longest silence of the engine within a request")

    max_in_flight: int = Field(64, ge=1, le=65536, description="requests inside the engine at once")
    max_queue: int = Field(256, ge=0, le=1 << 20, description="requests waiting for a place in the engine")
    max_per_key: int | None = Field(None, ge=1, le=65536, description="waiting and running requests of one API key")
    max_tokens_in_flight: int | None = Field(
        None,
        ge=1,
        le=1 << 40,
        description="prompt and completion tokens inside the engine; default: 4 x max_total_tokens where that is known",
    )
    default_completion_tokens: int = Field(
        512, ge=1, le=1 << 24, description="what a request without max_tokens counts as sampling"
    )
    requests_per_minute: int | None = Field(None, ge=1, le=1 << 40, description="of one API key, unless it has its own")
    tokens_per_minute: int | None = Field(
        None, ge=1, le=1 << 40, description="prompt and completion tokens of one API key, unless it has its own"
    )
    queue_timeout_s: float = Field(60.0, gt=0, le=3600, description="longest wait in the queue before a 503")

    heartbeat_interval_s: float = Field(1.0, gt=0, le=10)
    heartbeat_timeout_s: float = Field(2.0, gt=0, le=10)
    heartbeat_misses: int = Field(
        3, ge=1, le=100, description="unanswered heartbeats in a row before the engine is killed; one stops readiness"
    )
    heartbeat_stale_s: float = Field(
        5.0, gt=0, le=3600, description="readiness stops while the scheduler's last sign of life is older than this"
    )
    engine_stall_limit_s: float = Field(
        20.0,
        gt=0,
        le=3600,
        description="the engine is killed when the scheduler's last sign of life is older than this",
    )
    engine_start_timeout_s: float = Field(900.0, gt=0, le=86400)
    engine_stop_timeout_s: float = Field(10.0, gt=0, le=600)
    restart_backoff_s: float = Field(1.0, gt=0, le=60, description="wait before the first restart; doubles each time")
    restart_backoff_max_s: float = Field(30.0, gt=0, le=3600)
    max_restarts: int = Field(5, ge=0, le=1000, description="failed starts in a row before the server gives up")
    restart_reset_s: float = Field(300.0, gt=0, le=86400, description="an engine up this long clears the restart count")

    device: Literal["cpu", "cuda"] = Field("cpu", description="where the engine runs")
    context_length: int | None = Field(None, ge=16, le=1 << 24, description="tokens; default is the model's own")
    max_total_tokens: int | None = Field(
        None,
        ge=256,
        le=1 << 30,
        description="size of the KV pool in tokens; default: 16,384 on the CPU, what the memory holds on a card",
    )
    max_running_requests: int = Field(32, ge=1, le=65536, description="requests decoded together")
    chunked_prefill_size: int = Field(2048, ge=16, le=1 << 20, description="tokens a prefill pass")
    tensor_parallel: int = Field(1, ge=1, le=64, description="ranks (cards) of one machine that share the model")
    engine_args: str = Field("", description="further arguments of SGLang's server, as on its command line")

    drain_s: float = Field(25.0, ge=0, le=3600, description="after SIGTERM, how long running requests may finish")
    exit_with_parent: bool = Field(False, description="stop when the process that started the server is gone")

    @property
    def hints(self) -> HintOptions:
        """Sites and layers that the engine keeps, and what a request gets.

        Raises:
            ConfigError: naming the setting.
        """
        return from_settings(self.hint_sites, self.hint_layers, self.hint_codes, self.hint_scale)

    @property
    def kv_tokens(self) -> int | None:
        """Size of a local engine's KV pool in tokens; None is what the memory of the card holds."""
        return self.max_total_tokens or (_CPU_KV_TOKENS if self.device == "cpu" else None)

    @property
    def token_budget(self) -> int | None:
        """Prompt and completion tokens that may be inside the engine at once; None does not limit them.

        Most requests end well before their `max_tokens`, so more than the KV pool holds may be let in. The pool of a
        remote engine, and one that is as large as a card's memory, are not known here.
        """
        if self.max_tokens_in_flight is not None:
            return self.max_tokens_in_flight
        if self.engine_urls:
            return None
        return None if self.kv_tokens is None else 4 * self.kv_tokens

    @classmethod
    def load(cls, **overrides: Any) -> Settings:
        """Settings from the environment, with `overrides` that are not None on top.

        Raises:
            ConfigError: a value is out of its range; `field` is the setting's name.
        """
        given = {name: value for name, value in overrides.items() if value is not None}
        try:
            return cls(**given)
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_context=False)[0]
            name = str(first["loc"][0]) if first["loc"] else "settings"
            shown = "a value" if name in ("api_key", "admin_key") else repr(first.get("input"))
            source = f"--{name.replace('_', '-')}" if name in given else f"TRACE_SERVE_{name.upper()}"
            raise ConfigError(
                f"{source}: got {shown}, {first['msg'][0].lower()}{first['msg'][1:]}", field=name
            ) from exc
