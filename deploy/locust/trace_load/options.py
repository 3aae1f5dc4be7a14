"""Options of the locust command line: one for each field of `LoadPlan`."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

from trace_serve.load.files import read_plan
from trace_serve.load.plan import LoadPlan, make_plan


def add_options(parser: Any) -> None:
    parser.add_argument(
        "--api-key", env_var="TRACE_SERVE_API_KEY", default="", is_secret=True, help="bearer key of the server"
    )
    parser.add_argument(
        "--swap-key", env_var="TRACE_SERVE_ADMIN_KEY", default="", is_secret=True, help="bearer key of its admin API"
    )
    parser.add_argument("--plan", default="", help="JSON file of a whole plan; other options replace its fields")
    parser.add_argument("--out", default="", help="directory for report.json, report.html, summary.csv, requests.csv")
    for name, field in LoadPlan.model_fields.items():
        if name == "users":  # locust has that one
            continue
        flag = "--" + name.replace("_", "-")
        default = "none" if field.default is None else field.default
        shown = f"{field.description}; default {default}".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, action="store_const", const=True, default=None, help=shown)
        else:
            parser.add_argument(flag, default=None, help=shown, include_in_web_ui=False)


def plan_of(options: Namespace) -> LoadPlan:
    """The plan that the command line describes.

    Raises:
        ConfigError: naming the flag.
    """
    given: dict[str, Any] = {}
    if options.plan:
        given = read_plan(Path(options.plan)).model_dump(mode="json", exclude_unset=True)
    for name in LoadPlan.model_fields:
        value = getattr(options, "num_users" if name == "users" else name, None)
        if value is not None and value != "":
            given[name] = value
    if options.run_time:  # locust's word for warm-up and measured time together
        warmup = make_plan({**given, "duration": 1.0}).warmup
        given["duration"] = max(float(options.run_time) - warmup, 0.0)
    return make_plan(given)
