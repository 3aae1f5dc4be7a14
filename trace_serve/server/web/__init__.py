"""Two self-contained pages: `/` to try the policy, `/docs` for the API. Neither loads anything from elsewhere."""

from trace_serve.server.web.routes import web_router

__all__ = ["web_router"]
