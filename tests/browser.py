"""A headless Chromium, driven through its DevTools protocol, for tests that look at pages."""

import asyncio
import base64
import contextlib
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_S = 30.0


def browser():
    """Its program; None: there is none here."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page that is open.

    Attributes:
        errors: What it said on its console that is an error, and what it threw.
        requests: The addresses that it asked for, its own first.
    """

    def __init__(self, socket):
        self._socket, self._count, self._answers = socket, 0, {}
        self._loaded = asyncio.Event()
        self.errors, self.requests = [], []
        self._reader = asyncio.create_task(self._read())

    async def do(self, method, **parameters):
        """One command of the protocol."""
        self._count += 1
        answer = self._answers[self._count] = asyncio.get_running_loop().create_future()
        command = {"id": self._count, "method": method, "params": parameters}
        await self._socket.send_json(command)
        found = await asyncio.wait_for(answer, START_S)
        assert "error" not in found, found
        return found["result"]

    async def open(self, url, width=1280, height=900, scheme="light"):
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.do(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        await self.do("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.do("Emulation.setEmulatedMedia", features=features)
        self._loaded.clear()
        await self.do("Page.navigate", url=url)
        await asyncio.wait_for(self._loaded.wait(), START_S)

    async def value(self, expression):
        """What an expression of JavaScript gives, a promise's too."""
        options = {"returnByValue": True, "awaitPromise": True}
        found = await self.do("Runtime.evaluate", expression=expression, **options)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, expression):
        """Waits until it is true."""
        for _ in range(200):
            if await self.value(expression):
                return
            await asyncio.sleep(0.1)
        raise AssertionError(f"never true: {expression}")

    async def press(self, key, text=""):
        typed = {"key": key, "code": key, **({"text": text} if text else {})}
        for kind in ("keyDown", "keyUp"):
            await self.do("Input.dispatchKeyEvent", type=kind, **typed)

    async def picture(self, file):
        options = {"format": "png", "captureBeyondViewport": True}
        found = await self.do("Page.captureScreenshot", **options)
        Path(file).write_bytes(base64.b64decode(found["data"]))

    async def _read(self):
        async for message in self._socket:
            found = json.loads(message.data)
            if "id" in found:
                self._answers.pop(found["id"]).set_result(found)
                continue
            what = found["params"]
            match found["method"]:
                case "Page.loadEventFired":
                    self._loaded.set()
                case "Runtime.exceptionThrown":
                    self.errors.append(what["exceptionDetails"])
                case "Runtime.consoleAPICalled" if what["type"] in ("error", "assert"):
                    self.errors.append(what["args"])
                case "Log.entryAdded" if what["entry"]["level"] == "error":
                    self.errors.append(what["entry"])
                case "Network.requestWillBeSent":
                    self.requests.append(what["request"]["url"])


@contextlib.asynccontextmanager
async def open_page():
    """A page of a browser of its own, which ends with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run"]
        options += ["--remote-debugging-port=0", f"--user-data-dir={folder}"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        program = subprocess.Popen([browser(), *options, "about:blank"], **quiet)
        try:
            port = await _port(Path(folder) / "DevToolsActivePort", program)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
                address = pages[0]["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    yield Page(socket)
        finally:
            program.terminate()
            program.wait(START_S)


async def _port(file, program):
    for _ in range(int(START_S / 0.1)):
        if file.is_file() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        assert program.poll() is None, "the browser ended"
        await asyncio.sleep(0.1)
    raise AssertionError("the browser did not start")
