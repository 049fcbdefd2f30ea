"""The gateway: reachable, ready, and the token accepted."""

from __future__ import annotations

from services.cli.checks.finding import Finding, Subject, ok, problem
from services.cli.client import GatewayClient, GatewayError, find_token
from services.common.errors import ConfigError

TIMEOUT_S = 5.0


def check_gateway(subject: Subject) -> list[Finding]:
    """Whether jobs can be read from it; nothing to check where none runs."""
    url = subject.url or (subject.state.url if subject.state else None)
    if url is None:
        return [ok("gateway", f"nothing is up in {subject.home}: start it with `millrace up`")]
    try:
        token = find_token(None if subject.url or subject.state is None else subject.state.token_file)
        with GatewayClient(url, token, timeout_s=TIMEOUT_S) as client:
            total = len(client.jobs())
    except ConfigError as error:
        return [problem("gateway", str(error), "correct MILLRACE_TOKEN_FILE, or give the token as MILLRACE_TOKEN")]
    except GatewayError as error:
        said, _, remedy = str(error).partition("\n")
        return [problem("gateway", f"{url}: {said}", remedy or "see its log: `millrace up` names the folder")]
    return [ok("gateway", f"{url} answers and takes the token; jobs listed: {total}")]
