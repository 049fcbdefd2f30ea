"""The gateway's port: free, or ours."""

from __future__ import annotations

import socket

import psutil

from services.cli.checks.finding import Finding, Subject, ok, problem


def check_port(subject: Subject) -> list[Finding]:
    """Whether `millrace up` could listen there, or does."""
    if subject.state is not None:
        return [ok("port", f"the gateway of this home listens at {subject.state.url}")]
    host, port = subject.settings.bind_host, subject.settings.gateway_port
    if port == 0:
        return [ok("port", "a free one is taken")]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            found = f"port {port} on {host} cannot be taken ({error.strerror}){_holder(port)}"
            return [problem("port", found, "choose another with --port (MILLRACE_GATEWAY_PORT)")]
    return [ok("port", f"port {port} on {host} is free")]


def _holder(port: int) -> str:
    """Who listens there, where this user may know."""
    try:
        for connection in psutil.net_connections("inet"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr[1:2] == (port,) and connection.pid:
                return f": {psutil.Process(connection.pid).name()} (process {connection.pid}) has it"
    except psutil.Error:
        pass
    return ""
