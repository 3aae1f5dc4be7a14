"""Log lines of the whole process: one JSON object each (or readable text), UTC times, and no secrets.

Our own events, uvicorn's, those of other libraries, Python warnings and uncaught exceptions all take this way.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import types
from typing import Literal

import orjson
import structlog
from structlog.processors import ExceptionRenderer
from structlog.tracebacks import ExceptionDictTransformer
from structlog.typing import EventDict, Processor, WrappedLogger

Format = Literal["json", "console"]

HIDDEN = "[hidden]"
_MIN_SECRET = 6
_writing = threading.RLock()
_secrets: dict[str, bytes] = {}
"""Each hidden text, in the forms in which it can stand in a line, and the same in UTF-8."""


def hide(secret: str) -> None:
    """Keeps a text out of every line from now on; texts so short that words would hold them are ignored."""
    if len(secret) >= _MIN_SECRET:
        for form in _forms(secret):
            _secrets[form] = form.encode("utf-8", "replace")


def forget(secret: str) -> None:
    """Undoes `hide` for a key that opens nothing any more."""
    for form in _forms(secret):
        _secrets.pop(form, None)


def _forms(secret: str) -> tuple[str, str]:
    """As it is, and as it would stand in a JSON line."""
    return secret, json.dumps(secret, ensure_ascii=False)[1:-1]


def without_secrets(line: str) -> str:
    """`line` with every hidden text replaced."""
    for secret in tuple(_secrets):
        if secret in line:
            line = line.replace(secret, HIDDEN)
    return line


def configure_logging(level: str, style: Format = "json") -> None:
    """Sends all log lines to standard error.

    Args:
        level: debug, info, warning or error.
        style: `json`, or `console` for people.
    """
    number = getattr(logging, level.upper())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    filtering = structlog.make_filtering_bound_logger(number)
    if style == "json":
        # Our own events do not go through the standard library, which costs several times what the line itself does.
        own: list[Processor] = [*shared, _plain_tracebacks(), structlog.processors.JSONRenderer(_dumps), _hidden_bytes]
        structlog.configure(own, filtering, logger_factory=_Lines, cache_logger_on_first_use=True)
    else:
        own = [*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter]
        structlog.configure(own, filtering, logger_factory=structlog.stdlib.LoggerFactory())
    handler = _LinesHandler()
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *_rendering(style), _hidden],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    # uvicorn logs each connection at info; urllib3 and asyncio are as talkative at debug.
    for name, least in (("uvicorn", logging.WARNING), ("urllib3", logging.INFO), ("asyncio", logging.INFO)):
        logging.getLogger(name).setLevel(max(number, least))
    logging.captureWarnings(True)
    _log_uncaught()


def _rendering(style: Format) -> list[Processor]:
    if style == "console":
        colors = sys.stderr.isatty()
        plain = structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=structlog.dev.plain_traceback)
        return [_one_line, plain]
    return [_plain_tracebacks(), structlog.processors.JSONRenderer(ensure_ascii=False)]


def _plain_tracebacks() -> Processor:
    """Local variables of a traceback would put keys and prompts into the log."""
    return ExceptionRenderer(ExceptionDictTransformer(show_locals=False))


def _write(line: bytes) -> None:
    """One line on standard error, whole whatever other threads write."""
    with _writing:
        sys.stderr.buffer.write(line + b"\n")
        sys.stderr.buffer.flush()


class _LinesHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            _write(self.format(record).encode("utf-8", "backslashreplace"))
        except Exception:
            self.handleError(record)


class _Lines:
    """What structlog writes our own events to."""

    def __init__(self, name: str = "trace_serve") -> None:
        self.name = name

    def msg(self, line: bytes) -> None:
        _write(line)

    log = debug = info = warning = warn = error = exception = critical = fatal = msg


def _dumps(event: EventDict, **_: object) -> bytes:
    try:
        return orjson.dumps(event, default=repr)
    except TypeError:
        # Unpaired surrogates and integers above 64 bits are not orjson's.
        return json.dumps(event, default=repr).encode()


def _one_line(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Control characters must not make lines, or colours, of their own on a terminal; structlog sees to the values."""
    said = event.get("event")
    if isinstance(said, str) and not said.isprintable():
        event["event"] = said.encode("unicode_escape").decode("ascii")
    return event


def _hidden_bytes(_: WrappedLogger, __: str, line: EventDict | bytes) -> bytes:
    assert isinstance(line, bytes)
    for secret in tuple(_secrets.values()):
        if secret in line:
            line = line.replace(secret, HIDDEN.encode())
    return line


def _hidden(_: WrappedLogger, __: str, line: EventDict | str) -> str:
    return without_secrets(str(line))


def _log_uncaught() -> None:
    log = structlog.get_logger("trace_serve.uncaught")

    def main_thread(kind: type[BaseException], error: BaseException, trace: types.TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            sys.__excepthook__(kind, error, trace)
            return
        log.critical("uncaught", exc_info=(kind, error, trace))

    def other_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
            name = None if args.thread is None else args.thread.name
            log.error("uncaught", thread=name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback))

    sys.excepthook = main_thread
    threading.excepthook = other_thread
