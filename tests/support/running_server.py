"""A server of a real checkpoint on this machine's CPU: both of its processes, as threads."""

from __future__ import annotations

import socket
import threading
import time

import httpx
import uvicorn
from toys import load_quietly

from stree_pipelines.commands.serve import KEEP_ALIVE_S
from stree_pipelines.serving.app import Server, make_app
from stree_pipelines.serving.engine_client import EngineClient
from stree_pipelines.serving.engine_end import EngineEnd
from stree_pipelines.serving.messages import received

TARGET = "checkpoints/python-docs-hybrid"


class Running:
    """A server that runs: its address, its parts, and a client."""

    def __init__(self, **options) -> None:
        settings = {"num_rows": 4, "max_length": 256, "num_prefixes": 8, **options}
        waiting, key = settings.pop("max_waiting", 64), settings.pop("api_key", None)
        drafter = settings.pop("drafter", "ngram:3")
        self.decoder = settings.pop("decoder", None) or load_quietly(TARGET, drafter, **settings)
        link, link_of_engine = socket.socketpair()
        self.end = EngineEnd(self.decoder, waiting, link_of_engine)
        self.engine = self.end.engine
        self.engine_thread = threading.Thread(target=self.end.run)
        self.engine_thread.start()
        self.server = Server(EngineClient(link, received(link.makefile("rb"))), "docs", key)
        listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        config = uvicorn.Config(
            make_app(self.server), log_level="error", timeout_keep_alive=KEEP_ALIVE_S
        )
        self.web = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.web.run, args=([listener],))
        self.thread.start()
        while not self.web.started:
            time.sleep(0.01)
        self.client = httpx.Client(base_url=self.url, timeout=120)

    def post(self, path: str = "/v1/chat/completions", **body) -> httpx.Response:
        return self.client.post(path, json=body)

    def close(self) -> None:
        self.client.close()
        self.web.should_exit = True
        self.thread.join()
        self.engine_thread.join()  # the connection's end is the engine's
