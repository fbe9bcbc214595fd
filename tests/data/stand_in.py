"""A server with OpenAI's HTTP API on the loopback that needs no model and breaks as told."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# Words of `make_tokenizer`, each of which is the token of its number.
END = 2


def words(tokens: list[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


class StandIn(ThreadingHTTPServer):
    """Answers with three words, the first of which depends on the seed.

    Args:
        gives_ids: whether the tokens of an answer are returned, as vLLM does.
        faults: what happens to the first tries of every request: a status, `drop` before an answer, or `break` in one.
        refuses: a word; a request that has it gets the status 400, always.
        delay: seconds that an answer takes.
        key: the key that is needed.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(
        self,
        gives_ids: bool = True,
        faults: tuple[str, ...] = (),
        refuses: str = "",
        delay: float = 0.0,
        key: str | None = None,
    ) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.gives_ids, self.faults, self.refuses, self.delay, self.key = gives_ids, faults, refuses, delay, key
        self.finish_reason = "stop"
        self.is_open = True
        self.requests: list[tuple[str, dict[str, Any]]] = []
        self.tries: Counter[int] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def __enter__(self) -> StandIn:
        threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes no connection any more, and breaks those that there are with the next request."""
        self.shutdown()
        self.server_close()
        self.is_open = False

    def handle_error(self, *_: object) -> None:
        """Clients that are killed are no news."""

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        tokens = [10 + body["seed"] % 300, 11, 12]
        choice: dict[str, Any] = {"index": 0, "finish_reason": self.finish_reason}
        if path.endswith("/chat/completions"):
            choice["message"] = {"role": "assistant", "content": words(tokens)}
        else:
            choice["text"] = words(tokens)
        if self.gives_ids:
            choice["token_ids"] = [*tokens, END] if self.finish_reason == "stop" else tokens
        return {"choices": [choice]}


class _Handler(BaseHTTPRequestHandler):
    server: StandIn
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.server.key and self.headers["Authorization"] != f"Bearer {self.server.key}":
            return self.reply(401, {})
        self.reply(200, {"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.requests.append((self.path, body))
            number = self.server.tries[body["seed"]]
            self.server.tries[body["seed"]] += 1
        fault = self.server.faults[number] if number < len(self.server.faults) else ""
        if not self.server.is_open:
            fault = "drop"
        if fault in ("drop", "break"):
            if fault == "break":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{")
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif fault:
            self.reply(int(fault), {"error": fault})
        elif self.server.refuses and self.server.refuses in json.dumps(body):
            self.reply(400, {"error": "I refuse."})
        else:
            time.sleep(self.server.delay)
            self.reply(200, self.server.answer(self.path, body))

    def reply(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
