"""A headless Chromium, driven through its debugging pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


class Browser:
    """A page in a browser of its own; close it at the end."""

    def __init__(self, url: str, folder: Path) -> None:
        asks, self._asks = os.pipe()
        self._told, tells = os.pipe()
        command = [
            CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe",
            "--disable-dev-shm-usage", "--no-first-run", f"--user-data-dir={folder}",
            "--window-size=900,900",
        ]
        shell = f'exec "$@" 3<&{asks} 4>&{tells}'
        self.process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command], pass_fds=(asks, tells),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )
        os.close(asks)
        os.close(tells)
        self._number, self._held = 0, b""
        target = self.send("Target.createTarget", url=url)["targetId"]
        attached = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session: dict[str, str] = {"sessionId": attached["sessionId"]}
        self.wait('document.readyState === "complete" && location.href !== "about:blank"')

    def send(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the debugging protocol, and return its result."""
        self._number += 1
        session = getattr(self, "_session", {})
        told = {"id": self._number, "method": method, "params": arguments, **session}
        os.write(self._asks, json.dumps(told).encode() + b"\0")
        while True:
            while b"\0" not in self._held:
                self._held += os.read(self._told, 2**16)
            message, _, self._held = self._held.partition(b"\0")
            answer = json.loads(message)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def run(self, script: str) -> Any:
        """Evaluate a script in the page, and return its value."""
        result = self.send(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def wait(self, script: str, seconds: float = 60.0) -> None:
        """Wait until a script's value is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.1)

    def screenshot(self, path: Path) -> None:
        """Write a picture of the page."""
        data = self.send("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def close(self) -> None:
        """End the browser."""
        self.process.kill()
        self.process.wait()
        os.close(self._asks)
        os.close(self._told)
