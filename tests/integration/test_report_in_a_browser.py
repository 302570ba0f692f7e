"""Reports and the live page in a headless Chromium: nothing fails, nothing is asked of anybody,
and all of it can be reached from the keyboard."""

import asyncio
import json
import threading

import pytest
from browser import browser, open_page
from run_folders import HOSTILE, metrics_row, run_folder

from hybridrl.report.html_page import render_report_page as page_of
from hybridrl.report.report_content import ReportContent
from hybridrl.report.report_server import ReportServer, ReportSite
from hybridrl.run_files.run_reader import open_run

pytestmark = pytest.mark.skipif(browser() is None, reason="no Chromium is installed here")
# Its last part is there, and the browser has told the charts how wide they are, which draws them.
DRAWN = "document.querySelector('#state h3') && document.querySelector('.chart svg path') !== null"


def written(folder, out):
    run = open_run(folder)
    out.write_text(page_of(run.name, ReportContent(run).data()))
    return out.as_uri()


def test_a_report_opens_alone_without_an_error(tmp_path):
    run = run_folder(tmp_path / "run", steps=40, samples_at=(1, 10), says=HOSTILE)
    url = written(run, tmp_path / "report.html")

    async def look():
        async with open_page() as page:
            for width, scheme in ((1280, "light"), (360, "dark")):
                await page.open(url, width=width, scheme=scheme)
                await page.until(DRAWN)
                await page.until("document.querySelectorAll('.chart svg path').length > 5")
                assert await page.value("document.querySelectorAll('[data-span]').length") > 5
                assert await page.value("document.querySelectorAll('.token').length") == 2
                assert await page.value("document.documentElement.scrollWidth") <= width
                shown = await page.value("document.querySelector('#data pre').innerText")
                assert shown.startswith("<|user|>\n1+1?<|assistant|>\n</script><script>alert(1)")
                assert await page.value("document.querySelectorAll('#data pre mark').length") == 1
                assert await page.value("document.images.length") == 0
                assert not await page.value(
                    "document.body.innerText.includes('could not be drawn')"
                )
            assert page.errors == [] and set(page.requests) == {url}

    asyncio.run(look())


@pytest.mark.more
def test_no_two_lines_of_a_chart_have_one_number(tmp_path):
    run = run_folder(tmp_path / "run", steps=0, samples_at=())
    figures = {"mismatch/k3": 1e-13, "throughput/tokens_per_second": 1.2e5, "policy/entropy": 0.5}
    rows = (
        metrics_row(step) | {name: value * (1 + step / 9) for name, value in figures.items()}
        for step in range(1, 6)
    )
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    url = written(run, tmp_path / "report.html")
    labels = (
        "[...document.querySelectorAll('.chart svg')].map((chart) => "
        "[...chart.querySelectorAll('text[text-anchor=end]')].map((one) => one.textContent))"
    )

    async def look():
        async with open_page() as page:
            await page.open(url)
            await page.until(DRAWN)
            found = await page.value(labels)
            assert any("e-13" in label for chart in found for label in chart)
            assert any("e5" in label for chart in found for label in chart)
            assert all(len(set(chart)) == len(chart) for chart in found), found

    asyncio.run(look())


@pytest.mark.more
def test_a_row_of_the_table_of_runs_is_a_line_on_a_narrow_screen(tmp_path):
    run_folder(tmp_path / "runs" / "one")
    server = ReportServer(ReportSite(tmp_path / "runs"))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    row = "document.querySelector('tbody tr')"

    async def look():
        async with open_page() as page:
            await page.open(server.url, width=360)
            await page.until(f"{row} !== null")
            assert await page.value(f"{row}.offsetHeight") < 40
            assert await page.value("document.documentElement.scrollWidth") <= 360

    try:
        asyncio.run(look())
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.more
def test_what_is_seen_by_pointing_is_reached_by_keys(tmp_path):
    run = run_folder(tmp_path / "run", steps=40, says="words")
    url = written(run, tmp_path / "report.html")
    chosen = "document.querySelector('.list [aria-selected=true]').id"

    async def look():
        async with open_page() as page:
            await page.open(url)
            await page.until(DRAWN)
            await page.value("document.querySelector('.chart svg').focus()")
            await page.press("ArrowLeft")
            await page.until("document.querySelector('.now').textContent.startsWith('step 39')")
            await page.value("document.querySelector('.lanes svg').focus()")
            lanes = "document.querySelector('.lanes svg').textContent"
            before = await page.value(lanes)
            await page.press("+", "+")
            await page.until(f"{lanes} !== {json.dumps(before)}")
            await page.press("ArrowDown")
            await page.until("document.querySelector('.tip').textContent.includes('device 0')")
            assert await page.value(chosen) == "sample-0"
            await page.value("document.querySelector('.list').focus()")
            await page.press("ArrowDown")
            assert await page.value(chosen) == "sample-1"
            await page.value("document.querySelector('.detail [aria-label=Tokens]').focus()")
            await page.press("ArrowRight")
            await page.until("document.querySelector('.detail').textContent.includes('1 of 2')")
            assert page.errors == []

    asyncio.run(look())


@pytest.mark.more
def test_a_search_finds_and_a_sort_sorts(tmp_path):
    run = run_folder(tmp_path / "run", rows=12)
    url = written(run, tmp_path / "report.html")
    first = "document.querySelector('.list [role=option]').textContent"

    async def look():
        async with open_page() as page:
            await page.open(url)
            await page.until(DRAWN)
            change = "e.dispatchEvent(new Event('{0}', {{bubbles: true}}))"
            search = "const e = document.querySelector('#samples input'); e.value = 'prompt 2'; "
            await page.value(f"(() => {{ {search}{change.format('input')} }})()")
            assert await page.value("document.querySelectorAll('.list [role=option]').length") == 4
            sort = "const e = document.querySelectorAll('#samples select')[1]; e.value = 'best'; "
            await page.value(f"(() => {{ {sort}{change.format('change')} }})()")
            assert (await page.value(first)).startswith("1.00")
            assert page.errors == []

    asyncio.run(look())


def test_the_live_page_shows_what_is_new(tmp_path):
    run = run_folder(tmp_path / "runs" / "one", state="running")
    server = ReportServer(ReportSite(tmp_path / "runs"))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    async def look():
        async with open_page() as page:
            await page.open(server.url)
            await page.until("document.querySelector('tbody a') !== null")
            await page.value("document.querySelector('tbody a').click()")
            await page.until("location.pathname.endsWith('/runs/one/')")
            await page.until(DRAWN)
            with (run / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(metrics_row(4)) + "\n")
            await page.until("document.querySelector('.facts').textContent.includes('4 of 3')")
            assert page.errors == []
            assert all(url.startswith(server.url) for url in page.requests)

    asyncio.run(look())
    server.shutdown()
    server.server_close()
