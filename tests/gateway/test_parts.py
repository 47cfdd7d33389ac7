"""Parts of the gateway alone: its settings, the names of its models, events taken apart, the page's view of it."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from gateway_server import model_folder

from rewarm.errors import EngineError, GatewayError
from rewarm.gateway.app import Gateway
from rewarm.gateway.models import check_folder, find_models
from rewarm.gateway.page.engine import Ask, Ended, Event, Reading, State, Text, Trouble
from rewarm.gateway.page_models import PageModels
from rewarm.gateway.settings import Settings, is_loopback
from rewarm.gateway.sse import DONE, read_events, write_event

T = TypeVar("T")

# Settings.


def test_settings_come_from_the_environment_and_arguments_win(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("REWARM_DIR", str(tmp_path / "kv"))
    monkeypatch.setenv("REWARM_PORT", "1234")
    monkeypatch.setenv("REWARM_MODELS", os.pathsep.join(["a", "/b c"]))
    monkeypatch.setenv("REWARM_MAX_BYTES", "1.5GiB")
    settings = Settings(port=99)
    assert settings.cache_dir == tmp_path / "kv"
    assert settings.port == 99
    assert settings.models == [Path("a"), Path("/b c")]
    assert settings.max_bytes == 3 * 2**29


@pytest.mark.parametrize("wrong", [{"port": -1}, {"host": "0.0.0.0"}, {"max_bytes": 0}, {"max_files": "x"}])
def test_settings_that_make_no_sense_are_one_error_of_ours(wrong: dict[str, Any]) -> None:
    with pytest.raises(GatewayError, match=next(iter(wrong))):
        Settings(**wrong)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost", "LocalHost."])
def test_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host", ["", "0.0.0.0", "::", "10.0.0.1", "localhost.com", "127.0.0.1.nip.io", "1", "::ffff:10.1"]
)
def test_not_loopback(host: str) -> None:
    assert not is_loopback(host)


# Models.


def test_names_are_folders_names_made_unique(tmp_path: Path) -> None:
    paths = [tmp_path / "a" / "m", tmp_path / "b" / "m", tmp_path / "a" / "m", tmp_path / "b" / ".." / "c" / "m"]
    models = find_models(Settings(models=paths))
    assert [model.name for model in models] == ["SmolLM2-135M-Instruct", "m", "m-2", "m-3"]
    assert [model.is_bundled for model in models] == [True, False, False, False]


def test_a_link_keeps_its_own_name(tmp_path: Path) -> None:
    real = model_folder(tmp_path / "0123abcd")
    (tmp_path / "nice").symlink_to(real)
    (model,) = find_models(Settings(models=[tmp_path / "nice"], bundled=False))
    assert model.name == "nice"
    assert model.prepare(lambda _part, _what: None) == tmp_path / "nice"


def test_what_cannot_be_a_model_says_why(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    gguf = tmp_path / "m.gguf"
    gguf.touch()
    told: list[str] = []

    def check(path: Path) -> None:
        with pytest.raises(EngineError) as caught:
            check_folder(path)
        told.append(str(caught.value))

    check(gguf)
    check(folder)
    folder.mkdir()
    check(folder)
    (folder / "config.json").write_text("{")
    check(folder)
    (folder / "config.json").write_text("[]")
    check(folder)
    (folder / "config.json").write_text("{}")
    check(folder)
    wanted = ["it is a file", "no such folder", "no config.json", "cannot be read", "no object", "no weights"]
    assert all(why in one for why, one in zip(wanted, told, strict=True)), told
    (folder / "model.safetensors").touch()
    assert check_folder(folder) == folder


# Events.


def run(work: Callable[[], Awaitable[T]]) -> T:
    async def whole() -> T:
        return await work()

    return asyncio.run(whole())


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_they_are_cut(size: int) -> None:
    # U+2028 is a line's end to some readers, and not in a stream of events.
    body = ': keepalive 1/2\n\ndata: {"a":"x\u2028y"}\r\n\r\ndata: nonsense\n\ndata: [DONE]\n\ndata: {"rest"'.encode()

    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), size):
            yield body[start : start + size]

    async def read() -> list[Any]:
        return [event async for event in read_events(pieces())]

    comment, data, nonsense, done = run(read)
    assert (comment.comment, comment.data) == ("keepalive 1/2", None)
    assert data.data == {"a": "x\u2028y"}
    assert nonsense.data is None and not nonsense.is_done
    assert done.is_done


def test_an_event_that_is_written_can_be_read() -> None:
    # Half of a pair of surrogates, as a model may break an emoji.
    written = write_event({"text": "line\nline \ud83d"})

    async def pieces() -> AsyncIterator[bytes]:
        yield written + DONE

    async def read() -> list[Any]:
        return [event async for event in read_events(pieces())]

    first, last = run(read)
    assert first.data == {"text": "line\nline \ud83d"}
    assert last.is_done


# What the page sees.


def with_page(settings: Settings, use: Callable[[PageModels], Awaitable[T]]) -> T:
    """What `use` gives in an event loop with a gateway, whose workers are ended then."""

    async def whole() -> T:
        gateway = Gateway(settings)
        try:
            return await use(PageModels(gateway))
        finally:
            await gateway.close()

    return asyncio.run(whole())


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, Text))


async def ask(models: PageModels, text: str) -> list[Event]:
    return [event async for event in models.chat("alpha", Ask([{"role": "user", "content": text}]))]


def test_the_page_sees_states_progress_text_and_what_the_cache_did(settings: Settings) -> None:
    async def use(models: PageModels) -> None:
        assert [(view.name, view.state) for view in models.views()] == [
            ("alpha", State.STOPPED),
            ("beta", State.STOPPED),
        ]
        await models.load("alpha")
        assert models.views()[0].state is State.READY
        first, *texts, last = await ask(models, "one two SAY well met")
        assert first == Reading(2, 5)
        assert said(texts) == "well met "
        assert isinstance(last, Ended) and last.finish_reason == "stop"
        assert last.report and last.report["prompt_tokens"] == 5
        await models.unload("alpha")
        assert models.views()[0].state is State.STOPPED

    with_page(settings, use)


@pytest.mark.parametrize(("text", "why"), [("DIE", "broken off"), ("DIE LATER", "broken off"), ("REFUSE", "non-neg")])
def test_the_page_is_told_what_went_wrong(settings: Settings, text: str, why: str) -> None:
    async def use(models: PageModels) -> None:
        with pytest.raises(Trouble, match=why):
            await ask(models, text)
        assert said(await ask(models, "a b")) == "b a "

    with_page(settings, use)


def test_the_page_is_told_why_a_model_does_not_load(settings: Settings, tmp_path: Path) -> None:
    broken = model_folder(tmp_path / "broken", start="fail")

    async def use(models: PageModels) -> None:
        for name, why in (("broken", "the weights do not fit"), ("gone", "There is no model")):
            with pytest.raises(Trouble, match=why):
                await models.load(name)
        assert models.views()[0].state is State.FAILED
        assert "the weights do not fit" in models.views()[0].message

    with_page(settings.model_copy(update={"models": [broken]}), use)


def test_a_private_chat_and_a_named_one_say_so_to_the_worker(settings: Settings) -> None:
    async def use(models: PageModels) -> None:
        for more in ({"is_private": True, "label": "c1"}, {"label": "c1"}, {}):
            async for _ in models.chat("alpha", Ask([{"role": "user", "content": "x"}], **more)):  # type: ignore[arg-type]
                pass

    with_page(settings, use)
    asked = [json.loads(line)["told"] for line in (settings.cache_dir / "asked.jsonl").read_text().splitlines()]
    assert asked == [{"X-Rewarm-Cache": "off"}, {"X-Rewarm-Conversation": "c1"}, {}]


def test_a_page_that_stops_listening_stops_the_worker(settings: Settings) -> None:
    async def use(models: PageModels) -> None:
        stream = models.chat("alpha", Ask([{"role": "user", "content": "SLOW"}]))
        async for event in stream:
            if isinstance(event, Text):
                break
        await stream.aclose()
        for _ in range(500):
            if (settings.cache_dir / "left").exists():
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the worker was not told")

    with_page(settings, use)
