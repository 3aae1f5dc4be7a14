"""`trace-serve serve`: options on top of the settings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trace_serve.errors import TraceServeError
from trace_serve.settings import Settings


def serve(
    policy: Annotated[
        str | None, typer.Argument(help="Policy directory, or NAME or NAME@VERSION in the registry.")
    ] = None,
    mode: Annotated[str | None, typer.Option(help="rollout (no verdict, hints on) or production.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on; 0 takes a free one.")] = None,
    verdict: Annotated[
        Path | None, typer.Option(help="Signed verdict; default: POLICY.verdict.dsse.json beside the policy.")
    ] = None,
    public_key: Annotated[Path | None, typer.Option(help="Pinned public key (PEM) for the verdict.")] = None,
    api_key: Annotated[
        str | None, typer.Option(help="Bearer key for clients; better given as TRACE_SERVE_API_KEY.")
    ] = None,
    key_file: Annotated[Path | None, typer.Option(help="API keys made with `trace-serve keys`.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate chain; the port then speaks TLS only.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM private key (mode 0600).")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="Clients must show a certificate signed by it.")] = None,
    cors_origin: Annotated[list[str] | None, typer.Option(help="Web origin that may call; repeat for more.")] = None,
    hint_dir: Annotated[Path | None, typer.Option(help="Directory for hint files.")] = None,
    hint_sites: Annotated[str | None, typer.Option(help="Sites to keep: experts_in, k, v, experts_mid.")] = None,
    hint_layers: Annotated[str | None, typer.Option(help="all, deeper-half, or layer indices as in 3,4,5.")] = None,
    hint_codes: Annotated[str | None, typer.Option(help="lsb, or full for whole codes.")] = None,
    hint_scale: Annotated[str | None, typer.Option(help="lsb, byte or none.")] = None,
    registry: Annotated[Path | None, typer.Option(help="Directory of policies that may be activated.")] = None,
    state_dir: Annotated[
        Path | None, typer.Option(help="Audit log and what else outlives the server; default: in the registry.")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(help="Port of the admin API, with the key of TRACE_SERVE_ADMIN_KEY; off by default.")
    ] = None,
    admin_host: Annotated[str | None, typer.Option(help="Address of the admin API.")] = None,
    engine_url: Annotated[
        list[str] | None,
        typer.Option(help="An engine that runs already, or a gateway before several; may be given more than once."),
    ] = None,
    engine_key_file: Annotated[Path | None, typer.Option(help="File with the bearer key of these engines.")] = None,
    engine_unverified: Annotated[
        bool | None,
        typer.Option("--engine-unverified", help="Take engines without /trace/report; only in rollout mode."),
    ] = None,
    engine_log: Annotated[Path | None, typer.Option(help="File for the engine's output.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Cards of this machine that share the model.")] = None,
    max_total_tokens: Annotated[int | None, typer.Option(help="Size of the engine's KV pool in tokens.")] = None,
    context_length: Annotated[int | None, typer.Option(help="Tokens; default is the model's own.")] = None,
    engine_args: Annotated[str | None, typer.Option(help="Further arguments of SGLang's server.")] = None,
    max_in_flight: Annotated[int | None, typer.Option(help="Requests inside the engine at once.")] = None,
    max_queue: Annotated[int | None, typer.Option(help="Requests waiting for a place.")] = None,
    max_per_key: Annotated[int | None, typer.Option(help="Requests of one API key, running and waiting.")] = None,
    drain_s: Annotated[float | None, typer.Option(help="Seconds running requests may finish after SIGTERM.")] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="json, or console for people.")] = None,
    otel_endpoint: Annotated[
        str | None, typer.Option(help="OTLP/HTTP collector for traces and metrics; default: OTEL_ variables.")
    ] = None,
    request_log: Annotated[
        Path | None, typer.Option(help="File of requests and answers that eval-gate can replay.")
    ] = None,
    request_log_redact: Annotated[
        str | None, typer.Option(help="presidio, module:function, or none to write texts as they are.")
    ] = None,
    request_log_share: Annotated[float | None, typer.Option(help="Share of conversations recorded; default 1.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all of this and print the engine's arguments; start nothing.")
    ] = False,
    exit_with_parent: Annotated[
        bool | None, typer.Option("--exit-with-parent", help="Stop when the starting process is gone.", hidden=True)
    ] = None,
) -> None:
    """Serves a policy over an OpenAI-compatible HTTP API.

    Every option can also be set as TRACE_SERVE_<NAME>; further limits and time-outs only so. Exit codes: 0 after
    SIGTERM or Ctrl-C, 3 when the policy may not be served, 4 when the engine cannot be kept running.
    """
    from trace_serve.server.run import check_policy, fail, serve_policy

    try:
        settings = Settings.load(
            mode=mode,
            host=host,
            port=port,
            verdict=verdict,
            public_key=public_key,
            api_key=api_key,
            key_file=key_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            tls_client_ca=tls_client_ca,
            cors_origins=",".join(cors_origin) if cors_origin else None,
            hint_dir=hint_dir,
            hint_sites=hint_sites,
            hint_layers=hint_layers,
            hint_codes=hint_codes,
            hint_scale=hint_scale,
            registry=registry,
            state_dir=state_dir,
            admin_port=admin_port,
            admin_host=admin_host,
            engine_urls=",".join(engine_url) if engine_url else None,
            engine_key_file=engine_key_file,
            engine_unverified=engine_unverified,
            engine_log=engine_log,
            device=device,
            tensor_parallel=tensor_parallel,
            max_total_tokens=max_total_tokens,
            context_length=context_length,
            engine_args=engine_args,
            max_in_flight=max_in_flight,
            max_queue=max_queue,
            max_per_key=max_per_key,
            drain_s=drain_s,
            log_level=log_level,
            log_format=log_format,
            otel_endpoint=otel_endpoint,
            request_log=request_log,
            request_log_redact=request_log_redact,
            request_log_share=request_log_share,
            exit_with_parent=exit_with_parent,
        )
        code = check_policy(policy, settings) if dry_run else serve_policy(policy, settings)
    except TraceServeError as error:
        code = fail(error)
    raise typer.Exit(code)
