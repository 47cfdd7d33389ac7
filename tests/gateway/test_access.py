"""Who may ask: keys and tenants, hosts, and what a request may not make the gateway or a worker do."""

from __future__ import annotations

import http.client
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from gateway_server import Running
from pydantic import SecretStr

from rewarm.errors import GatewayError
from rewarm.gateway.keys import Keys
from rewarm.gateway.settings import Settings
from waiting import until

OWNER, GUEST, FRIEND = "owner-key-0123456789", "guest-key-0123456789", "friend-key-012345678"


@pytest.fixture
def keyed(settings: Settings) -> Iterator[Running]:
    """A gateway with an owner, a guest, and a friend who shares."""
    keys: Any = [OWNER, GUEST, f"{FRIEND}:share"]
    values = {
        name: getattr(settings, name) for name in ("cache_dir", "data_dir", "models", "bundled", "worker_command")
    }
    gateway = Running(Settings(**values, api_keys=keys, discover=[], stop_timeout_s=5))
    yield gateway
    gateway.close()


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked_by(running: Running, key: str, **headers: str) -> httpx.Response:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "one two three"}]}
    return running.client.post("/v1/chat/completions", json=body, headers={**bearing(key), **headers})


def test_without_a_key_nothing_is_told(keyed: Running) -> None:
    for path in ("/v1/models", "/api/models", "/api/stats", "/metrics", "/openapi.json", "/v1/nothing", "/", "/chat"):
        for headers in ({}, bearing("wrong-key-0123456789"), bearing("x"), {"Authorization": f"Basic {OWNER}"}):
            answer = keyed.client.get(path, headers=headers)
            assert answer.status_code == 401, path
            assert "alpha" not in answer.text
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert keyed.client.post("/api/models/alpha/load").status_code == 401
    assert keyed.asked() == []


def test_a_key_opens_what_it_may(keyed: Running) -> None:
    assert keyed.client.get("/v1/models", headers=bearing(GUEST)).status_code == 200
    assert keyed.client.get("/v1/models", headers={"x-api-key": GUEST}).status_code == 200
    for path in ("/api/models", "/api/stats", "/metrics", "/openapi.json", "/"):
        refused = keyed.client.get(path, headers=bearing(GUEST))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "not_an_admin")
    assert keyed.client.get("/api/models", headers=bearing(OWNER)).status_code == 200
    assert keyed.client.get("/metrics", headers=bearing(OWNER)).status_code == 200


def test_each_key_is_a_tenant_of_its_own_b071(keyed: Running) -> None:
    for key in (OWNER, GUEST, FRIEND):
        # A client's own word for it counts for nothing.
        assert asked_by(keyed, key, **{"X-Rewarm-Tenant": "00ff"}).status_code == 200
    owner, guest, friend = (one["told"].get("X-Rewarm-Tenant") for one in keyed.asked())
    assert owner and guest and owner != guest and len(owner) == 64
    assert friend is None
    assert OWNER.encode().hex() not in owner


def test_nothing_is_shared_between_keys_and_all_of_it_by_those_that_share_b071(settings: Settings) -> None:
    command = (sys.executable, str(Path(__file__).with_name("cache_worker.py")))
    keys: Any = [OWNER, GUEST, f"{FRIEND}:share", "other-friend-0123456:share"]
    gateway = Running(settings.model_copy(update={"worker_command": command, "api_keys": [SecretStr(k) for k in keys]}))
    replies: list[int] = []
    gateway.gateway.workers.on_reply(lambda _model, report, _ttft_s: replies.append(report["cached_tokens"]))
    body = {"model": "alpha", "messages": [{"role": "user", "content": "one two three"}], "stream": True}
    try:
        for key in (OWNER, GUEST, FRIEND, "other-friend-0123456", OWNER, GUEST):
            answer = gateway.client.post("/v1/chat/completions", json=body, headers=bearing(key))
            assert answer.status_code == 200 and "[DONE]" in answer.text
        until(lambda: len(replies) == 6)
        assert replies == [0, 0, 0, 3, 3, 3]
    finally:
        gateway.close()


def test_without_keys_nobody_is_a_tenant(running: Running) -> None:
    running.client.post(
        "/v1/chat/completions",
        json={"model": "alpha", "messages": [{"role": "user", "content": "x"}]},
        headers={"X-Rewarm-Tenant": "00ff", "X-Rewarm-Cache": "read-only", "X-Rewarm-Conversation": "a.b-c:1"},
    )
    assert running.asked()[0]["told"] == {"X-Rewarm-Cache": "read-only", "X-Rewarm-Conversation": "a.b-c:1"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("X-Rewarm-Cache", "maybe"),
        ("X-Rewarm-Cache", "OFF"),
        ("X-Rewarm-Conversation", ""),
        ("X-Rewarm-Conversation", "../x"),
        ("X-Rewarm-Conversation", "a" * 129),
        ("X-Rewarm-Conversation", "a b"),
    ],
)
def test_a_wrong_header_is_refused_before_a_model_is_loaded(running: Running, name: str, value: str) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "x"}]}
    answer = running.client.post("/v1/chat/completions", json=body, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_header")
    assert running.state()["state"] == "stopped"


def test_the_page_asks_for_the_key_once(keyed: Running) -> None:
    page = {"Accept": "text/html"}
    with httpx.Client(base_url=keyed.url, trust_env=False) as browser:
        asking = browser.get("/", headers=page)
        assert asking.status_code == 401 and 'name="key"' in asking.text
        assert "form-action 'self'" in asking.headers["Content-Security-Policy"]
        assert browser.post("/login", data={"key": "wrong-key-0123456789"}).status_code == 401
        assert browser.post("/login", data={"key": GUEST}).status_code == 401
        assert browser.post("/login", content=b"key=" + b"a" * 10_000).status_code == 413
        done = browser.post("/login", data={"key": OWNER})
        assert (done.status_code, done.headers["Location"]) == (303, "/")
        cookie = done.headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=strict" in cookie and OWNER not in cookie
        assert browser.get("/api/models").status_code == 200
    forged = {"Cookie": f"rewarm-key={'0' * 64}"}
    assert keyed.client.get("/api/models", headers=forged).status_code == 401
    assert keyed.client.get("/api/models", headers={"Cookie": f"rewarm-key={OWNER}"}).status_code == 401


def test_a_websocket_needs_the_key_too(keyed: Running) -> None:
    def status(cookie: str) -> int:
        connection = http.client.HTTPConnection("127.0.0.1", keyed.port)
        upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
        key = {"Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA=="}
        connection.request("GET", "/_nicegui_ws/socket.io/", headers={**upgrade, **key, "Cookie": cookie})
        answered = connection.getresponse().status
        connection.close()
        return answered

    assert status("") == 403


def test_hosts_and_origins_are_checked_with_a_key_too(keyed: Running) -> None:
    headers = {**bearing(OWNER), "Host": "evil.example"}
    assert keyed.client.get("/v1/models", headers=headers).json()["error"]["code"] == "host_not_allowed"
    headers = {**bearing(OWNER), "Origin": "http://evil.example"}
    assert keyed.client.get("/v1/models", headers=headers).json()["error"]["code"] == "origin_not_allowed"


def test_another_address_needs_a_key_and_takes_any_name_of_its_own(settings: Settings) -> None:
    with pytest.raises(GatewayError, match="an API key is needed"):
        Settings(host="0.0.0.0")
    values = {
        name: getattr(settings, name) for name in ("cache_dir", "data_dir", "models", "bundled", "worker_command")
    }
    gateway = Running(Settings(**values, host="0.0.0.0", api_keys=[OWNER]))  # type: ignore[list-item]
    try:
        for host in ("box.lan:8420", "192.168.1.7"):
            headers = {**bearing(OWNER), "Host": host}
            assert gateway.client.get("/v1/models", headers=headers).status_code == 200
            assert gateway.client.get("/v1/models", headers={"Host": host}).status_code == 401
            assert gateway.client.get("/v1/models", headers={**headers, "Origin": "http://evil"}).status_code == 403
        assert gateway.client.get("/v1/models", headers={**bearing(OWNER), "Host": "a b"}).status_code == 403
    finally:
        gateway.close()


def test_keys_are_told_nowhere(keyed: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    asked_by(keyed, GUEST)
    shown = repr(keyed.settings) + caplog.text + keyed.client.get("/api/models", headers=bearing(OWNER)).text
    assert all(key not in shown for key in (OWNER, GUEST, FRIEND))


@pytest.mark.parametrize(
    "text", ["short", "a" * 300, "with space 0123456789", f"{OWNER}:root", ":admin", f"{OWNER}\n1"]
)
def test_a_key_that_is_none_is_refused_without_repeating_it(text: str) -> None:
    with pytest.raises(GatewayError, match="API key 2 makes no sense") as caught:
        Keys([OWNER, text])
    assert text not in str(caught.value).replace(":share or :admin", "")


# What a request may not do.


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x"}},
        {"type": "image_url", "image_url": "https://example.org/x.png"},
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        {"type": "input_image", "image_url": " HTTP://example.org"},
        {"type": "image", "source": {"type": "url", "url": "https://example.org"}},
        {"type": "tool_result", "content": [{"type": "image", "source": {"type": "url", "url": "http://x"}}]},
        {"type": "input_file", "file_url": "https://example.org/x.pdf"},
    ],
)
def test_no_address_is_fetched_for_a_request(running: Running, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "x"}, part]}]
    for path, field in (("chat/completions", "messages"), ("responses", "input"), ("messages", "messages")):
        answer = running.client.post(f"/v1/{path}", json={"model": "alpha", field: messages})
        assert answer.status_code in (400, 501)
    answer = running.client.post("/v1/chat/completions", json={"model": "alpha", "messages": messages})
    assert answer.json()["error"]["code"] == "address_not_allowed"
    assert running.asked() == []


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "tool_use", "input": {"image_url": "http://example.org"}},
        {"type": "text", "text": "http://example.org"},
    ],
)
def test_what_is_in_the_request_passes(part: dict[str, Any]) -> None:
    from rewarm.gateway.asking import for_worker

    messages = [{"role": "user", "content": [part]}]
    body, _ = for_worker({"model": "alpha", "messages": messages}, is_openai=True)
    assert body["messages"] == messages


def test_a_deep_body_is_refused_or_passed_and_breaks_nothing(running: Running) -> None:
    for depth in (500, 5_000, 100_000):
        deep = "[" * depth + "]" * depth
        raw = f'{{"model": "alpha", "messages": [{{"role": "user", "content": "x"}}], "metadata": {deep}}}'
        answer = running.client.post("/v1/chat/completions", content=raw)
        assert answer.status_code in (200, 400, 502)
    assert running.chat("x").status_code == 200


def test_a_body_without_a_length_is_bounded_everywhere(settings: Settings) -> None:
    gateway = Running(settings.model_copy(update={"max_body_bytes": 1000}))
    try:
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("PATCH", "/api/models/alpha"),
            ("PATCH", "/api/settings"),
        ):
            answer = gateway.client.request(method, path, content=(b"x" * 500 for _ in range(5)))
            assert answer.status_code in (400, 413), path
            assert answer.json()["error"]["message"]
    finally:
        gateway.close()


@pytest.mark.parametrize(
    "path", ["/api/entries/../../../etc/passwd", "/api/entries/%2e%2e%2f%2e%2e", "/api/entries/x%00y"]
)
def test_entry_names_are_ids_and_nothing_else(running: Running, path: str) -> None:
    for method in ("GET", "DELETE"):
        with socket.create_connection(("127.0.0.1", running.port), timeout=10) as raw:
            raw.sendall(f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
            head = raw.makefile("rb").readline()
        assert head.split()[1] in (b"400", b"404", b"405"), head


def test_engines_that_lack_an_api_say_so_in_its_shape(running: Running) -> None:
    for path in ("responses", "embeddings"):
        answer = running.client.post(f"/v1/{path}", json={"model": "alpha", "input": "x"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (501, "not_offered_by_engine")
    answer = running.client.post("/v1/messages", json={"model": "alpha", "messages": [], "max_tokens": 1})
    assert answer.status_code == 501
    assert answer.json()["type"] == "error" and "mlx-lm" in answer.json()["error"]["message"]
    wrong = running.client.post("/v1/messages", json={"model": "gamma"}).json()
    assert wrong["error"]["type"] == "not_found_error"


def test_head_is_answered_as_get_is(running: Running) -> None:
    for path in ("/v1/models", "/api/models", "/v1/models/alpha"):
        answer = running.client.head(path)
        assert (answer.status_code, answer.content) == (200, b"")
    assert running.client.head("/v1/models/gamma").status_code == 404


def test_the_reply_tells_what_the_cache_did_in_its_head(running: Running) -> None:
    running.chat("one two three")
    answer = running.chat("one two three four")
    assert answer.headers["X-Rewarm-Cached-Tokens"] == "3"
    assert answer.headers["X-Rewarm-Reason"] == "nothing_stored"


def test_a_client_that_leaves_a_whole_reply_ends_it_at_the_worker(running: Running) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "HANG"}]}
    with pytest.raises(httpx.ReadTimeout):
        running.client.post("/v1/chat/completions", json=body, timeout=1.5)
    until((running.settings.cache_dir / "left").exists)


def test_a_large_body_that_is_announced_and_never_sent_is_refused_all_the_same(running: Running) -> None:
    url = running.client.base_url
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {url.host}:{url.port}\r\nContent-Length: 99999999999\r\n\r\n{{"
    with socket.create_connection((url.host, url.port or 80), timeout=60) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
