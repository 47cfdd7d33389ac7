"""`/v1`: what passes through, and every way in which it may not."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
import socket
import threading
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gateway_server import Running, is_alive

from waiting import until


def test_models_are_listed_and_none_is_loaded_for_it(running: Running) -> None:
    listed = running.client.get("/v1/models").json()
    assert [one["id"] for one in listed["data"]] == ["alpha", "beta"]
    assert listed["object"] == "list"
    assert running.client.get("/v1/models/beta").json()["id"] == "beta"
    assert running.state()["state"] == "stopped"


def test_a_chat_is_answered_under_the_public_name(running: Running) -> None:
    answer = running.chat("one two three", temperature=0.5)
    assert answer.status_code == 200
    body = answer.json()
    assert body["model"] == "alpha"
    assert body["choices"][0]["message"]["content"] == "three two one"
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert body["rewarm"]["prompt_tokens"] == 3
    (asked,) = running.asked()
    assert asked["temperature"] == 0.5
    assert asked["model"] == "default_model"


def test_a_completion_is_answered(running: Running) -> None:
    answer = running.client.post("/v1/completions", json={"model": "beta", "prompt": "a b"}).json()
    assert (answer["model"], answer["choices"][0]["text"]) == ("beta", "b a")


def test_a_stream_passes_piece_by_piece_with_its_comments(running: Running) -> None:
    lines = running.chat("one two", stream=True).text.split("\n\n")
    assert lines[0] == ": keepalive 1/2"
    chunks = [json.loads(line[6:]) for line in lines[1:-2]]
    assert {chunk["model"] for chunk in chunks} == {"alpha"}
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "two one "
    assert lines[-2:] == ["data: [DONE]", ""]


def test_usage_comes_in_a_stream_to_those_who_asked(running: Running) -> None:
    asking = running.chat("one two", stream=True, stream_options={"include_usage": True}).text
    assert '"cached_tokens"' in asking and '"rewarm"' in asking
    assert "usage" not in running.chat("one two", stream=True).text
    assert [asked["stream_options"]["include_usage"] for asked in running.asked()] == [True, True]


def test_the_openai_client_is_served(running: Running) -> None:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "SAY well met"}]
        whole = client.chat.completions.create(model="alpha", messages=messages)
        assert whole.choices[0].message.content == "well met"
        stream = client.chat.completions.create(
            model="alpha", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = list(stream)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "well met "
        assert chunks[-1].usage and chunks[-1].usage.prompt_tokens_details.cached_tokens == 2
        assert client.completions.create(model="beta", prompt="a b").choices[0].text == "b a"
        assert [model.id for model in client.models.list()] == ["alpha", "beta"]
        with pytest.raises(openai.NotFoundError, match="There is no model 'gamma'. Models offered: alpha, beta"):
            client.chat.completions.create(model="gamma", messages=messages)
        with pytest.raises(openai.BadRequestError, match="non-negative integer"):
            client.chat.completions.create(model="alpha", messages=[{"role": "user", "content": "REFUSE"}])


def test_two_models_have_a_worker_each(running: Running) -> None:
    running.chat("x", "alpha")
    running.chat("x", "beta")
    first, second = running.state("alpha"), running.state("beta")
    assert first["state"] == second["state"] == "ready"
    assert first["pid"] != second["pid"]
    assert [asked["model_folder"].rpartition("/")[2] for asked in running.asked()] == ["alpha", "beta"]


# What is refused, before any worker is started.


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"\xff\xfe", 400, "invalid_json"),
        (b"[1]", 400, "invalid_json"),
        (b"[" * 100_000, 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"messages": []}', 400, "missing_model"),
        (b'{"model": 7}', 400, "missing_model"),
        (b'{"model": "alpha", "stream": "yes"}', 400, None),
        (b'{"model": "../alpha"}', 404, "model_not_found"),
        (b'{"model": "/etc"}', 404, "model_not_found"),
        (b'{"model": "default_model"}', 404, "model_not_found"),
        (b'{"model": "alpha", "adapters": "/tmp/x"}', 400, None),
        (b'{"model": "alpha", "draft_model": "someone/else"}', 400, None),
    ],
)
def test_a_wrong_request_is_refused_in_openais_shape(
    running: Running, body: bytes, status: int, code: str | None
) -> None:
    answer = running.client.post("/v1/chat/completions", content=body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert running.state()["state"] == "stopped"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/../etc/passwd", "/v1/model/x/y", "/v1/", "/api/nothing"])
def test_an_unknown_address_is_told_in_json(running: Running, path: str) -> None:
    answer = running.client.get(path)
    assert answer.status_code == 404
    if path.startswith(("/v1/e", "/v1/m", "/api")):
        assert answer.json()["error"]["code"] == "unknown_url"


def test_get_where_post_is_meant(running: Running) -> None:
    assert running.client.get("/v1/chat/completions").json()["error"]["code"] == "unknown_url"


def test_a_body_that_is_too_large_is_refused_by_its_length(running: Running) -> None:
    size = running.settings.max_body_bytes + 1
    answer = running.client.post("/v1/chat/completions", content=b" " * size)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


def test_a_body_without_a_length_is_cut_off(running: Running) -> None:
    pieces = (b" " * 2**20 for _ in range(running.settings.max_body_bytes // 2**20 + 2))
    try:
        answer = running.client.post("/v1/chat/completions", content=pieces)
    except httpx.TransportError:
        return  # the gateway closed the connection while we were still sending
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


# Whom it answers.


def ask_as(running: Running, **headers: str) -> tuple[int, dict[str, Any]]:
    """POST with these headers; a `Host` of ours replaces the right one."""
    connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    connection.putrequest("POST", "/api/models/alpha/unload", skip_host="Host" in named)
    for name, value in {**named, "Content-Length": "0"}.items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    body = json.loads(response.read())
    connection.close()
    return response.status, body


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "LOCALHOST:80", "[::1]:9", "127.8.9.1:1"])
def test_loopback_names_are_answered(running: Running, host: str) -> None:
    assert ask_as(running, Host=host)[0] == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.evil.example:80",
        "192.168.1.2",
        "",
        "127.0.0.1@evil.example",
    ],
)
def test_other_names_are_refused_since_a_rebound_name_is_one(running: Running, host: str) -> None:
    status, body = ask_as(running, Host=host)
    assert (status, body["error"]["code"]) == (403, "host_not_allowed")


def test_its_own_page_may_ask(running: Running) -> None:
    assert ask_as(running, Origin=running.url)[0] == 200


@pytest.mark.parametrize(
    "origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost", "file://"]
)
def test_other_pages_may_not(running: Running, origin: str) -> None:
    status, body = ask_as(running, Origin=origin)
    assert (status, body["error"]["code"]) == (403, "origin_not_allowed")


def test_pages_may_load_nothing_from_elsewhere(running: Running) -> None:
    headers = running.client.get("/v1/models").headers
    policy = headers["content-security-policy"]
    assert "default-src 'self'" in policy and "http" not in policy
    assert "access-control-allow-origin" not in headers


def test_no_page_of_ours_loads_scripts_from_another_host(running: Running) -> None:
    assert running.client.get("/docs").status_code == 404
    described = running.client.get("/openapi.json").json()
    assert {"/v1/models", "/v1/chat/completions", "/api/models/{name}/unload", "/api/stats"} <= set(described["paths"])


# When workers fail.


def test_a_worker_that_ends_before_it_answers_is_a_502_and_is_started_again(running: Running) -> None:
    answer = running.chat("DIE")
    assert answer.status_code == 502
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("server_error", "worker_failed")
    assert "exit status 9" in error["message"] and "next request starts the model again" in error["message"]
    assert running.state()["state"] == "failed"
    assert running.chat("one two").json()["choices"][0]["message"]["content"] == "two one"


def test_a_worker_that_ends_in_a_stream_is_told_in_the_stream(running: Running) -> None:
    answer = running.chat("DIE LATER", stream=True)
    assert answer.status_code == 200
    *_, last, empty = answer.text.split("\n\n")
    assert empty == "" and "[DONE]" not in answer.text
    assert json.loads(last[6:])["error"]["code"] == "worker_failed"
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "DIE LATER"}]
        with pytest.raises(openai.APIError, match="broken off"):
            list(client.chat.completions.create(model="alpha", messages=messages, stream=True))


def test_an_engine_that_fails_in_a_stream_has_the_last_word(running: Running) -> None:
    *_, last, empty = running.chat("FAIL LATER", stream=True).text.split("\n\n")
    assert json.loads(last[6:]) == {"error": {"message": "The engine failed: RuntimeError: no memory"}}
    assert empty == ""
    assert running.state()["state"] == "ready"


def test_a_worker_that_was_killed_between_requests_is_not_noticed(running: Running) -> None:
    running.chat("x")
    pid = running.state()["pid"]
    os.kill(pid, signal.SIGKILL)
    until(lambda: not is_alive(pid))
    assert running.chat("one two").status_code == 200
    assert running.state()["pid"] != pid


def test_a_worker_that_is_killed_as_the_request_comes_is_not_noticed(running: Running) -> None:
    for _ in range(6):
        running.chat("x")
        os.kill(running.state()["pid"], signal.SIGKILL)
        answer = running.chat("one two")
        assert answer.status_code == 200, answer.text


def test_a_request_that_ends_its_worker_is_not_asked_twice(running: Running) -> None:
    assert running.chat("DIE").status_code == 502
    assert len(running.asked()) == 1


def test_a_client_that_leaves_a_stream_ends_the_request(running: Running) -> None:
    body = {"model": "alpha", "messages": [{"role": "user", "content": "SLOW"}], "stream": True}
    with running.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        next(answer.iter_lines())
    until((running.settings.cache_dir / "left").exists)
    assert running.state()["state"] == "ready"


def test_a_client_that_leaves_before_the_answer_ends_the_request(running: Running) -> None:
    running.chat("x")
    body = json.dumps({"model": "alpha", "messages": [{"role": "user", "content": "HANG"}]}).encode()
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: len(running.asked()) == 2)
    until((running.settings.cache_dir / "left").exists)


def test_one_that_leaves_while_the_model_loads_does_not_spoil_it_for_the_other(running: Running) -> None:
    body = json.dumps({"model": "alpha", "messages": [{"role": "user", "content": "one"}]}).encode()
    answers: list[int] = []
    with socket.create_connection(("127.0.0.1", running.port)) as connection:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        until(lambda: running.state()["state"] != "stopped")
        other = threading.Thread(target=lambda: answers.append(running.chat("two").status_code))
        other.start()
    other.join()
    assert answers == [200]


def test_prompts_and_secrets_are_in_no_log_and_no_argument(running: Running, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    running.chat("xyzzyxyzzy")
    running.chat("xyzzyxyzzy", stream=True)
    running.client.post("/v1/chat/completions", content=b'{"xyzzyxyzzy')
    running.chat("DIE xyzzyxyzzy")
    running.chat("again")
    pid = running.state()["pid"]
    secret = running.gateway.workers.get("alpha")._running.client.headers["authorization"].removeprefix("Bearer ")  # type: ignore[union-attr]
    arguments = Path(f"/proc/{pid}/cmdline").read_text() if is_alive(pid) else ""
    tail = "\n".join(running.gateway.workers.get("alpha").log_tail)
    for text in (caplog.text, tail, arguments):
        assert secret not in text
    assert "xyzzy" not in caplog.text
    assert "(secret)" in tail
    assert "of 1 prompt tokens restored" in caplog.text
