"""The live page in a real browser: light and dark, on phone and desktop screens."""

import asyncio
import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from browser import BROWSER, browsing
from PIL import Image
from server_process import exchange, post, running_server, status_of

from nestrec.exporters.servable_writer import write_servable
from nestrec.models.hstu import HSTUConfig
from nestrec.serving.security.auth import ApiKeyEntry, add_entry, digest_of, generate_key
from nestrec_bench.harness.random_model import random_ranking, random_retrieval

LOOKS = {
    "desktop-light": {"width": 1180, "height": 900}, "desktop-dark": {"width": 1180, "height": 900, "dark": True},
    "phone-light": {"width": 390, "height": 844, "is_phone": True},
    "phone-dark": {"width": 390, "height": 844, "dark": True, "is_phone": True},
}  # fmt: skip
SCREENSHOTS = os.environ.get("NESTREC_PICTURES")
"""Folder for screenshots, such as docs/pictures. If it is set, the load lasts a minute, so that charts have data."""
TITLE_ADJECTIVES = ("Silent", "Golden", "Last", "Hidden", "Broken", "Northern", "Paper", "Second", "Electric", "Winter")
TITLE_NOUNS = ("River", "Harbor", "Garden", "Signal", "Mountain", "Orchard", "Station", "Letter", "Island", "Mirror")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    encoder = HSTUConfig(dim=16, num_layers=2, num_heads=2, head_dim=8, max_length=512)
    parts = ["", " II", " III"]
    titles = tuple(f"{TITLE_ADJECTIVES[i % 10]} {TITLE_NOUNS[i // 10 % 10]}{parts[i // 100]}" for i in range(300))
    write_servable(replace(random_retrieval(encoder, num_items=300), item_titles=titles), folder / "retrieval")
    write_servable(random_ranking(encoder, num_items=300), folder / "ranking")
    return folder


def body_of(user, count=60):
    items = [str(1 + (user * 7 + i * 13) % 300) for i in range(count)]
    history = {"items": items, "times_ms": list(range(1, count + 1)), "actions": ["click"] * count}
    history["features"] = {"tab": ["home"] * count}
    return {"user": f"someone-secret-{user}", "history": history}


def with_key(key, path, body):
    return post(path, body).replace(b"\r\nhost:", f"\r\nx-api-key: {key}\r\nhost:".encode(), 1)


def visit(port, keys):
    """Send a pre-infer request of one user, wait until the prefill is done, and send the ranking request."""

    def num_preinferred():
        response = exchange(port, with_key(keys["admin"], "/v1/status", {}).replace(b"POST", b"GET", 1))
        status = response.split(b"\r\n\r\n", 1)[1]
        return json.loads(status)["models"]["ranking"]["counts"].get("preinfer_done", 0)

    before = num_preinferred()
    assert status_of(exchange(port, with_key(keys["public"], "/v1/preinfer", body_of(77)))) == 202
    while num_preinferred() == before:
        time.sleep(0.005)  # another process computes: there is no clock to inject
    ranked = {**body_of(77), "candidates": ["3"], "context": {"tab": "home"}}
    assert status_of(exchange(port, with_key(keys["public"], "/v1/rank", ranked))) == 200


async def load(port, key, num_visits, rate):
    """Send pre-infer and ranking requests of recurring users."""

    async def send(path, body):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(with_key(key, path, body))
        await reader.read()
        writer.close()

    async def visit(user):
        body = body_of(user, 40 + 37 * (user % 9))
        await send("/v1/preinfer", body)
        if user % 3:
            await asyncio.sleep(0.02)
        candidates = [str(1 + i) for i in range(100)]
        await send("/v1/rank", {**body, "candidates": candidates, "context": {"tab": "home"}})

    visits = []
    for number in range(num_visits):
        visits.append(asyncio.create_task(visit(number * 11 % 40)))
        await asyncio.sleep(1.0 / rate)
    await asyncio.gather(*visits, return_exceptions=True)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
def test_live_page_shows_status_and_sends_requests(folders, tmp_path):
    keys = {role: generate_key() for role in ("admin", "public")}
    path = tmp_path / "keys.toml"
    for role, key in keys.items():
        add_entry(path, ApiKeyEntry(name=role, role=role, sha256=digest_of(key.encode()).hex()))
    options = (
        "--model",
        str(folders / "ranking"),
        "--limits.default_timeout_ms",
        "10000",
        "--security.api_keys",
        str(path),
        "--service.engine.preinfer.policy",
        "all",
    )
    with running_server(folders / "retrieval", *options) as (port, _), browsing(tmp_path / "browser") as tab:
        request = with_key(keys["public"], "/v1/recommend", {**body_of(1), "context": {"tab": "home"}, "k": 3})
        assert status_of(exchange(port, request)) == 200
        asyncio.run(load(port, keys["public"], 1500 if SCREENSHOTS else 6, 25.0 if SCREENSHOTS else 20.0))
        url = f"http://127.0.0.1:{port}/"
        visit(port, keys)
        tab.set_viewport(**LOOKS["desktop-light"])
        tab.open(url)
        tab.until("document.getElementById('login')?.hidden === false")
        assert tab.run("document.querySelectorAll('#charts figure').length") == 0
        for role, state in (("public", "this API key is not authorized"), ("admin", "live, ")):
            tab.run(f"document.getElementById('key').value = {json.dumps(keys[role])}")
            tab.run("document.getElementById('login').requestSubmit()")
            tab.until(f"document.getElementById('state').textContent.startsWith({json.dumps(state)})")
        assert not tab.run("['login', 'slots'].some(id => document.getElementById(id).offsetParent)"), (
            "these elements are hidden"
        )
        assert keys["admin"] not in tab.run("document.documentElement.outerHTML")
        assert tab.run("sessionStorage.length + localStorage.length") == 0
        tab.until("document.querySelectorAll('#charts polyline').length > 3")
        titles = tab.run("[...document.querySelectorAll('#charts figcaption')].map(e => e.textContent)")
        assert titles == [
            "Requests per second", "Latency, ms", "Prefix cache hits", "Utilization", "Queued work, ms", "Model age",
        ]  # fmt: skip
        assert tab.run("document.querySelectorAll('#relay rect').length") > 8
        assert tab.run("document.querySelectorAll('#relay .link').length") > 0, (
            "a pre-infer request and its ranking request are linked"
        )
        assert "P99 ms" in tab.run("document.getElementById('tiles').innerText")
        assert "version" in tab.run("document.getElementById('models').innerText")

        # A request from the form, with an item that was found by its title.
        tab.until("document.getElementById('route').options.length > 2")
        tab.run(
            "const s = document.getElementById('search'); s.value = 'golden h'; s.dispatchEvent(new Event('input'))"
        )
        tab.until("document.querySelector('#found button')?.textContent === 'Golden Harbor'")
        tab.run("document.querySelector('#found button').click()")
        assert json.loads(tab.run("document.getElementById('body').value"))["history"]["items"][-1] == "12"
        body = json.dumps({**body_of(2), "context": {"tab": "home"}, "k": 5})
        tab.run(f"document.getElementById('body').value = {json.dumps(body)}; document.getElementById('send').click()")
        rows = tab.until("document.getElementById('results').rows.length")
        assert rows == 6
        assert tab.run("document.getElementById('results').rows[0].innerText").split("\t")[1:3] == ["item", "title"]
        assert tab.run("document.getElementById('results').rows[1].cells[2].textContent").split()[0] in TITLE_ADJECTIVES
        assert tab.run("document.getElementById('outcome').textContent").startswith("200 in ")

        for name, look in LOOKS.items():
            tab.set_viewport(**look)
            width = tab.until("document.querySelectorAll('#charts svg').length && document.documentElement.scrollWidth")
            assert width <= look["width"], f"{name}: the page must not scroll horizontally"
            dark = tab.run("getComputedStyle(document.body).backgroundColor")
            assert dark == ("rgb(20, 22, 26)" if look.get("dark") else "rgb(246, 247, 249)")
            picture = tab.screenshot()
            assert picture.startswith(b"\x89PNG")
            assert len(picture) > 20_000, "the screenshot is not blank"
            if SCREENSHOTS:
                drawn = Image.open(io.BytesIO(picture)).convert("RGB").quantize(96)
                drawn.save(Path(SCREENSHOTS) / f"live-{name}.png", optimize=True)
        shown = "[...document.querySelectorAll('#try > button, #try input, #try select')]"
        assert tab.run(f"{shown}.every(e => e.getBoundingClientRect().height >= 40)"), (
            "controls must be large enough for touch"
        )
        shown = tab.run("document.body.innerText")
        assert "someone-secret" not in shown.partition("Try a request")[0]
        assert {text for text in tab.errors if "401" not in text and "403" not in text} == set()
        assert all(address.startswith(url) for address in tab.requested_urls), "the page loads nothing from other hosts"
