"""Headless Chromium driven by DevTools, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Chromium:
    """One page in a headless browser, driven by DevTools."""

    def __init__(self, folder: Path) -> None:
        from websockets.sync.client import connect

        if CHROMIUM is None:
            raise SystemExit("this needs Chromium: apt-get install chromium")
        self._stack = contextlib.ExitStack()
        self.process = subprocess.Popen(
            [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--window-size=1600,1000",
             "--disable-background-networking", "--remote-debugging-port=0", f"--user-data-dir={folder}",
             "about:blank"],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        port_file = folder / "DevToolsActivePort"
        until = time.monotonic() + 30
        while not port_file.exists() or not port_file.read_text().strip():
            if time.monotonic() > until:
                raise SystemExit("Chromium did not start")
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list") as answer:
            page = next(target for target in json.load(answer) if target["type"] == "page")
        self._socket = self._stack.enter_context(connect(page["webSocketDebuggerUrl"], max_size=None))
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(60))
            if message.get("id") == self._number:
                return message.get("result", {})
            self.events.append(message)

    def wait(self, method: str) -> dict[str, Any]:
        while True:
            message = json.loads(self._socket.recv(60))
            if message.get("method") == method:
                return message["params"]
            self.events.append(message)

    def js(self, text: str) -> Any:
        found = self.call("Runtime.evaluate", expression=text, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise SystemExit(f"the page failed: {found['exceptionDetails']}")
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 60.0) -> None:
        """Wait until an expression holds in the page."""
        end = time.monotonic() + seconds
        page = "document.documentElement"  # there is none for a moment while a page loads
        while not self.js(f"Boolean({page} && ({condition}))"):
            if time.monotonic() > end:
                raise AssertionError(f"not within {seconds:g} s: {condition}")
            time.sleep(0.05)

    def said(self) -> list[str]:
        """What the page wrote to the console, errors, what its policy refused; after Runtime.enable and Log.enable."""
        self.js("0")
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        told = [event["params"] for event in self.events if event.get("method") in names]
        return [json.dumps(each)[:500] for each in told if each.get("entry", {}).get("level") != "verbose"]

    def __enter__(self) -> Chromium:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self.process.terminate()
        self.process.wait(20)
