"""`rewarm serve`: opens the gateway's address, says where things are, and stays until it is told to end."""

from __future__ import annotations

import logging
import signal
import socket
import sys
from types import FrameType

import uvicorn

from rewarm.errors import GatewayError
from rewarm.gateway.app import Gateway, create_app
from rewarm.gateway.page.cache_mount import mount_cache_pages
from rewarm.gateway.page.mount import mount_pages
from rewarm.gateway.page_models import PageModels
from rewarm.gateway.settings import Settings

_SHOWN = 8
"""Models that are named at the start."""

_GRACE_S = 2
"""How long streams may go on after the signal to end."""


def run(settings: Settings) -> None:
    """Serve until SIGINT or SIGTERM; then end every worker and return.

    Raises:
        GatewayError: the address cannot be listened at.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("rewarm").setLevel(logging.INFO)
    with _listen(settings) as listener:
        gateway = Gateway(settings)
        app = create_app(gateway)
        mount_cache_pages(gateway.cache_admin)
        gateway.before_close(mount_pages(app, PageModels(gateway), settings.data_dir / "chats").close)
        server = uvicorn.Server(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=_GRACE_S,
            )
        )

        def end(_number: int, _frame: FrameType | None) -> None:
            server.should_exit = True

        # Before uvicorn listens to signals itself; it raises them again once it has ended, for whoever was there.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, end)
        _announce(gateway, listener)
        try:
            server.run(sockets=[listener])
        finally:
            gateway.workers.kill()


def _listen(settings: Settings) -> socket.socket:
    host, port = settings.host.strip("[]"), settings.port
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        if sys.platform != "win32":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # So that nobody gets "connection refused" who reads the address and is quick.
        listener.listen(128)
    except OSError as error:
        raise GatewayError(
            f"Port {port} at {host} cannot be opened: {error.strerror or error}. "
            "If another `rewarm serve` runs, use that one, or choose another port with --port."
        ) from None
    return listener


def _announce(gateway: Gateway, listener: socket.socket) -> None:
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    lines = (
        f"rewarm: http://{shown}:{port}",
        f"  API     http://{shown}:{port}/v1",
        f"  models  {_listed(gateway.workers.names)}",
        f"  cache   {gateway.disk_cache.told()}",
        "Ctrl-C ends it.",
    )
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}" if names else "none: give one with --model PATH"
