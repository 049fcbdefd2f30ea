"""A bad network between the services and Redis, through the cutting proxy."""

from __future__ import annotations

import time
from pathlib import Path

from services.common.service.stack_state import read_state
from tests.chaos import waits
from tests.chaos.campaign import Campaign, campaign
from tests.chaos.faults import Options
from tests.chaos.proxy import ProxyThread, server_of
from tests.chaos.result import Result
from tests.chaos.stack import PROXIED_URL


def network(options: Options) -> Result:
    """The services reach Redis through a proxy that loses replies (`cut`), adds 500 ms (`latency`), or stands still (`half-open`)."""

    proxy = ProxyThread(lambda: server_of(stack_url(options.home)), seed=options.seed)
    try:
        environment = {PROXIED_URL: proxy.url}
        with campaign(options.home, f"network: {options.target}", options.seed, environment=environment) as running:
            _NETWORK[options.target](running, proxy, options)
            proxy.faults.cut_reply, proxy.faults.latency_s, proxy.faults.frozen = 0.0, 0.0, False
            running.result.extra["replies_cut"] = proxy.counts.replies_cut
            _judge_waits(running)
            running.finish()
    finally:
        proxy.stop()
    return running.result


def _judge_waits(running: Campaign) -> None:
    """No service waited for longer than twice the wait's own deadline."""
    wait = waits.longest(running.stack.folder)
    if wait is None:
        running.result.violations.append("no service has noted how long it waits")
        return
    said = f"{wait.what} {wait.seconds:.1f} s, deadline {wait.deadline_s:g} s"
    running.result.extra["longest wait"] = said
    if wait.share > waits.MOST:
        running.result.violations.append(f"a wait beyond {waits.MOST:g} times its deadline: {said}")


def _cut(running: Campaign, proxy: ProxyThread, options: Options) -> None:
    proxy.faults.cut_reply = 0.03
    while proxy.counts.replies_cut < options.count:
        running.trial(lambda: None)
    running.result.count = proxy.counts.replies_cut


def _latency(running: Campaign, proxy: ProxyThread, options: Options) -> None:
    proxy.faults.latency_s = 0.25
    for _ in range(options.count):
        running.trial(lambda: None)


def _half_open(running: Campaign, proxy: ProxyThread, options: Options) -> None:
    def strike() -> None:
        proxy.faults.frozen = True
        time.sleep(options.hold_s or 30.0)
        proxy.break_all()
        proxy.faults.frozen = False

    for _ in range(options.count):
        running.trial(strike)


_NETWORK = {"cut": _cut, "latency": _latency, "half-open": _half_open}


def stack_url(home: Path) -> str:
    """Where this home's Redis listens now.

    Raises:
        OSError: it is not up.
    """
    state = read_state(home)
    if state is None:
        raise ConnectionError("no stack")
    return state.redis_url
