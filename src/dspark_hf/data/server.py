"""Answers from a server with OpenAI's HTTP API, such as vLLM or SGLang."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from urllib3 import BaseHTTPResponse, PoolManager, Retry, Timeout
from urllib3.exceptions import ConnectTimeoutError, HTTPError, MaxRetryError, NewConnectionError

from .backends import Answer, BackendGone, Decoding, Question, RowFailed

TRANSIENT = {429, *range(500, 600)}
"""Statuses after which a request is sent again."""


@dataclass(frozen=True)
class Server:
    """Where a server is and how it is used.

    Args:
        base_url: the address of its API, such as `http://localhost:8000/v1`.
        model: the name under which it serves the target; the target's own if unset.
        api_key: its key; the variable OPENAI_API_KEY if unset.
        concurrency: most requests at once.
        timeout: seconds until a request that brings nothing is sent again.
        retries: how often a request is sent again where the connection breaks, the time is up, or the server answers
            with the status 429 or 5xx.
        backoff: seconds between the first tries, twice as many with each further one; a `Retry-After` of the server
            goes before.

    Raises:
        ValueError: for a value out of range.
    """

    base_url: str
    model: str | None = None
    api_key: str | None = field(default=None, repr=False)
    concurrency: int = 32
    timeout: float = 600.0
    retries: int = 5
    backoff: float = 1.0

    def __post_init__(self) -> None:
        if not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"`base_url` is {self.base_url!r}; give one such as http://localhost:8000/v1.")
        if self.concurrency < 1:
            raise ValueError(f"`concurrency` is {self.concurrency}; it must be at least 1.")
        if not self.timeout > 0:
            raise ValueError(f"`timeout` is {self.timeout}; give a positive number of seconds.")
        for name in ("retries", "backoff"):
            if getattr(self, name) < 0:
                raise ValueError(f"`{name}` is {getattr(self, name)}; it must not be negative.")


class ServerBackend:
    """Answers with a server: chat completions for chats, completions for text.

    vLLM returns the tokens of an answer when asked to; of servers that do not, the text has to do. Each request
    carries its own seed, so that answers do not depend on what is asked beside them, as far as the server keeps to it.

    Args:
        server: where it is.
        model: the name under which it serves the target, unless `server` has one.
        decoding: how answers are decoded.

    Raises:
        OSError: where nothing answers there, or the key is refused.
        ValueError: where it serves other models only.
    """

    def __init__(self, server: Server, model: str, decoding: Decoding) -> None:
        self.server, self.decoding = server, decoding
        self.workers = server.concurrency
        self._model = server.model or model
        key = server.api_key or os.environ.get("OPENAI_API_KEY")
        self._pool = PoolManager(
            maxsize=server.concurrency,
            block=True,
            headers={"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {}),
            timeout=Timeout(connect=min(server.timeout, 10.0), read=server.timeout),
            retries=Retry(
                total=server.retries,
                backoff_factor=server.backoff,
                status_forcelist=TRANSIENT,
                allowed_methods=None,
                raise_on_status=False,
            ),
        )
        self._check_models()

    def __call__(self, question: Question) -> Answer:
        # Whatever is left out is what the server takes from the model's generation config.
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": question.max_new_tokens,
            "temperature": self.decoding.temperature,
            "top_p": self.decoding.top_p,
            "top_k": self.decoding.top_k or -1,
            "seed": question.seed,
            "return_token_ids": True,
        }
        if question.messages is None:
            path, body["prompt"] = "completions", question.input_ids
        else:
            path, body["messages"] = "chat/completions", question.messages
            if question.template_options:
                body["chat_template_kwargs"] = question.template_options
        response = self._send("POST", path, json.dumps(body))
        if response.status != 200:
            raise RowFailed(f"the server answers with status {response.status}", _text(response))
        try:
            return _answer(json.loads(response.data))
        except (LookupError, TypeError, ValueError) as error:
            raise RowFailed("the server's answer is not as in OpenAI's API", _text(response)) from error

    def _send(self, method: str, path: str, body: str | None = None, **options: Any) -> BaseHTTPResponse:
        url = f"{self.server.base_url.rstrip('/')}/{path}"
        try:
            return self._pool.request(method, url, body=body, **options)
        except MaxRetryError as error:
            # A server to which no connection can be made is down; one that breaks it off may do so for this row.
            if isinstance(error.reason, (NewConnectionError, ConnectTimeoutError)):
                raise BackendGone(
                    f"No server answers at {self.server.base_url!r} (`base_url`): {error.reason}. Start it, or give "
                    "the address where it is; the same command then goes on from here."
                ) from error
            raise RowFailed("the connection to the server breaks", str(error.reason)) from error
        except HTTPError as error:
            raise RowFailed("the request to the server fails", str(error)) from error

    def _check_models(self) -> None:
        """Said before the first row: a wrong address, key or name fails them all. Servers without a list are fine."""
        try:
            response = self._send("GET", "models", retries=Retry(total=1, status=0, raise_on_status=False))
            served = [model["id"] for model in json.loads(response.data)["data"]] if response.status == 200 else []
        except (RowFailed, LookupError, TypeError, ValueError):
            return
        if response.status in (401, 403):
            raise PermissionError(
                f"The server at {self.server.base_url!r} refuses the key (status {response.status}); give the right "
                "one as `api_key`, or in OPENAI_API_KEY."
            )
        if served and self._model not in served:
            raise ValueError(
                f"The server at {self.server.base_url!r} does not serve {self._model!r}; give the name under which it "
                f"serves the target as `model`: {', '.join(map(repr, served))}."
            )

    def __enter__(self) -> ServerBackend:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.clear()


def _text(response: BaseHTTPResponse) -> str:
    return response.data.decode(errors="replace")[:500]


def _answer(body: dict[str, Any]) -> Answer:
    """The first choice of a response."""
    choice = body["choices"][0]
    reason, input_ids = choice["finish_reason"], choice.get("token_ids") or choice.get("response_token_ids")
    if reason not in ("stop", "length"):
        raise RowFailed(f"the server ends the answer with `{reason}`")
    if "message" not in choice:
        text, thoughts = choice["text"], None
    else:
        message = choice["message"]
        text, thoughts = message["content"] or "", message.get("reasoning_content") or message.get("reasoning")
    if not isinstance(text, str):
        raise TypeError("text that is none")
    if thoughts and not input_ids:
        raise RowFailed("the server takes thoughts out of the answer; start it without a reasoning parser")
    # With token ids, thoughts included, the text is theirs.
    prompt_ids = choice.get("prompt_token_ids") or body.get("prompt_token_ids")
    return Answer(reason, input_ids, None, prompt_ids) if input_ids else Answer(reason, text=text)


__all__ = ["Server", "ServerBackend"]
