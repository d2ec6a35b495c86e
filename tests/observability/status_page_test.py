"""The status page of a real ckptd in a real browser: what it shows of a job, and that no name of anybody's does anything in it."""

from __future__ import annotations

import os
import pathlib
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from browser import Browser
from node import Node
from prometheus import DEADLINE_S

JOB = "llama.7b_run-1"
RANKS = 4
STEPS = 3
EVIL = "<img src=x onerror=document.title=1>"  # no '/': a directory may be called so

SETTINGS = f"""\
node_name: node-a
status_page: {{address: "127.0.0.1:0"}}
nvme: {{dirs: [ROOT/nvme]}}
remote: {{dir: "ROOT/{EVIL}"}}
policy: {{remote: {{every_steps: 1}}}}
cluster:
  listen_address: "127.0.0.1:0"
  advertise_address: "127.0.0.1:0"
  labels: [{{name: rack, value: "</td><script>document.title=1</script>"}}]
"""


def address_of(node: Node) -> str:
    port = re.search(r"status_page_port=(\d+)", (node.root / "log").read_text())
    assert port is not None and port[1] != "0", node.log()
    return f"http://127.0.0.1:{port[1]}/"


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    """A node whose job has saved in all tiers, and runs."""
    one = Node(SETTINGS)
    one.remote = one.root / EVIL
    one.remote.mkdir()
    try:
        one.start()
        one.start_job(JOB, RANKS, 1)
        one.ask("restore")  # there is nothing yet
        for step in range(1, STEPS + 1):
            one.save(step)
            assert one.ask("tier nvme") == ["ok nvme"] * RANKS
            assert one.ask("tier remote") == ["ok remote"] * RANKS
        yield one
    finally:
        one.close()


@pytest.fixture
def browser(node: Node) -> Iterator[Browser]:
    with Browser() as one:
        one.open(address_of(node))
        one.wait_for("Number(document.body?.dataset.looks) >= 1")
        yield one
        # Whatever the test did: nothing ran that is not the page's, nor was anything asked of others.
        assert one.evaluate("document.title") == "Holdfast"
        assert one.evaluate("document.querySelectorAll('script, img, iframe, object').length") == 1
        others = [
            url
            for url in one.navigations
            if not url.startswith((address_of(node), "data:", "about:"))
        ]
        assert others == []


def texts(browser: Browser, selector: str) -> list[str]:
    return list(
        browser.evaluate(f"[...document.querySelectorAll({selector!r})].map((e) => e.innerText)")
    )


def test_shows_nodes_tiers_steps_protection_saves_and_throughput(
    node: Node, browser: Browser
) -> None:
    for step in range(STEPS + 1, STEPS + 3):  # while somebody looks
        node.save(step)
        assert node.ask("tier nvme") == ["ok nvme"] * RANKS
        assert node.ask("tier remote") == ["ok remote"] * RANKS
    newest = STEPS + 2
    browser.wait_for(
        f"document.querySelector('.steps [data-step=\"{newest}\"] td:last-child .map')?.dataset.cells == '{'g' * RANKS}'"
    )
    # What was written between two looks is drawn.
    browser.wait_for(
        "Number(document.querySelector('.throughput[data-tier=nvme]')?.dataset.samples) >= 2"
    )
    assert (
        browser.evaluate(
            "document.querySelector('[data-tier=nvme] .plot-written').getAttribute('points').split(' ').length"
        )
        >= 2
    )

    assert browser.evaluate("[...document.querySelectorAll('.job')].map((e) => e.dataset.job)") == [
        JOB
    ]
    [job] = texts(browser, ".job")
    assert f"attempt 1, running; {RANKS} of {RANKS} ranks alive" in job
    assert browser.evaluate(
        "[...document.querySelectorAll('#tiers [data-tier]')].map((e) => e.dataset.tier)"
    ) == ["memory", "nvme", "peer", "remote"]
    protection = "\n".join(texts(browser, ".protection tr"))
    assert re.search(rf"all nodes\s+step {newest} \(attempt 1\)\s.*remote", protection)
    assert browser.evaluate(
        "[...document.querySelectorAll('.steps tbody tr')].map((e) => e.dataset.step)"
    )[0] == str(newest)
    # A letter for each rank, and of each save its stages.
    maps = browser.evaluate(
        f"[...document.querySelectorAll('.steps [data-step=\"{newest}\"] .map')].map((e) => e.dataset.cells)"
    )
    assert maps == ["g" * RANKS] * 3  # memory, nvme, remote
    assert browser.evaluate("document.querySelectorAll('.timeline rect.s-nvme').length") == newest
    assert browser.evaluate("document.querySelectorAll('.timeline rect.s-failed').length") == 0
    [row] = texts(browser, "#nodes [data-node]")
    assert row.startswith("node-a\tthis one\t")
    assert "</td><script>document.title=1</script>" in row  # as a text
    if where := os.environ.get("HOLDFAST_SCREENSHOT"):
        browser.screenshot(pathlib.Path(where))
    assert browser.complaints == []


def test_a_trouble_is_shown_with_whatever_is_in_its_text(node: Node, browser: Browser) -> None:
    away = node.root / "away"
    node.remote.rename(away)
    try:
        node.save(100)
        browser.wait_for("document.querySelector('#tiers [data-tier=remote] .ill') != null")
        [remote] = texts(browser, "#tiers [data-tier=remote]")
        assert EVIL in remote
        assert browser.complaints == []
    finally:
        away.rename(node.remote)
    assert node.ask("tier remote") == ["ok remote"] * RANKS
    browser.wait_for("document.querySelector('#tiers [data-tier=remote] .ill') == null")


def test_the_browser_forbids_whatever_else_would_run_in_the_page(browser: Browser) -> None:
    """The policy works, and the other tests would see what breaks it."""
    browser.evaluate(
        "const s = document.createElement('script'); s.textContent = 'document.title = 1';"
        "document.body.appendChild(s); s.remove()"
    )
    browser.wait_for("true")
    assert any("Content Security Policy" in one for one in browser.complaints), browser.complaints
    browser.complaints.clear()
    browser.evaluate("fetch('http://127.0.0.1:1/').catch(() => {}); 1")
    browser.wait_for("document.title == 'Holdfast'")
    assert any("Content Security Policy" in one for one in browser.complaints), browser.complaints


def test_a_page_of_another_name_gets_nothing(node: Node) -> None:
    """As after DNS rebinding: the browser would take the answer for its own site's."""
    request = urllib.request.Request(
        f"{address_of(node)}status.json", headers={"Host": "evil.example"}
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=DEADLINE_S)
    assert refused.value.code == 421
    assert JOB not in refused.value.read().decode()


# The last one: there is no daemon after it.
def test_a_daemon_that_dies_is_shown_as_away(node: Node, browser: Browser) -> None:
    node.kill()
    browser.wait_for("document.getElementById('state').className == 'ill'")
    assert "ckptd is away for " in browser.evaluate("document.getElementById('state').textContent")
    assert texts(browser, ".job") != []  # what it said last stays
