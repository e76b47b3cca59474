"""Ask an OpenAI-compatible server by HTTP: vLLM, and servers that answer alike.

Prompts are lists of token ids, never text. The key of a server that asks for one is
read from FCSD_SERVER_API_KEY and goes into the header of a request, nowhere else.

Not covered: starting a server; chat completions, whose template is the server's.
"""

import asyncio
import contextlib
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from fcsd.base.errors import UserError, one_line
from fcsd.base.strict import Rule, refuse

API_KEY = "FCSD_SERVER_API_KEY"
# without any answer, until an evaluation gives up: a server restarts in minutes
PATIENCE_S = 300.0
_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_LONGEST_WAIT_S, _REPORT_AFTER_S = 15.0, 10.0
# a long answer comes in one piece
_TIMEOUT = httpx2.Timeout(10.0, read=3600.0, write=60.0, pool=None)
Body = dict[str, Any]


class _Retry(Exception):
    """An answer that is worth asking for again. after_s: the wait that the server asks
    for.
    """

    def __init__(self, reason: str, after_s: float = 0.0):
        super().__init__(reason)
        self.after_s = after_s


class _Outage:
    """The time in which no request has come back."""

    def __init__(self) -> None:
        self.since: float | None = None
        self.reported = False

    def lasted(self, url: str, reason: str, now_s: float) -> float:
        """Return its seconds so far; a longer one is reported once, on stderr."""
        self.since = now_s if self.since is None else self.since
        if now_s - self.since > _REPORT_AFTER_S and not self.reported:
            self.reported = True
            minutes = f"{PATIENCE_S / 60:g} minutes"
            print(
                f"server {url} does not answer ({reason}); trying for {minutes}",
                file=sys.stderr,
                flush=True,
            )
        return now_s - self.since


class Server:
    """One address; `look` must be the first call.

    Attributes:
        model: the server's name of the model; context: tokens of prompt and answer
        that it takes, None if it does not say; facts: engine, version, dtype and
        parallelism, as far as it tells, for records and keys.
        root: the folder or hub id that it was started with; prompt_logprobs, token_ids:
        whether it returns them, of the prompt and of an answer.

    Raises (all methods):
        UserError: one line with the address: nothing answers, no such server, a missing
            key, a refusal.
    """

    def __init__(self, url: str, *, concurrency: int = 64):
        self.url, self.concurrency = url, concurrency
        self.model, self.root = "", ""
        self.prompt_logprobs, self.token_ids = False, False
        self.context: int | None = None
        self.facts: dict[str, Any] = {}
        self._engine = ""
        key = os.environ.get(API_KEY)
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def look(self, model: str) -> None:
        """Find the served model and the engine that serves it; of several models, the
        one with the name or path `model`.
        """
        cards = self._get("/v1/models").get("data")
        known = isinstance(cards, list) and all(isinstance(c, dict) for c in cards)
        if not cards or not known:
            raise self.error(
                "lists no model at /v1/models: this is not an OpenAI-compatible server"
            )
        # A model may be served under its name or under its path.
        names = {model, str(Path(model).resolve())}
        named = [c for c in cards if names & {str(c.get("id")), str(c.get("root"))}]
        # A card with a parent is an adapter.
        chosen = named[:1] or [card for card in cards if not card.get("parent")]
        if len(chosen) != 1:
            served = ", ".join(str(card.get("id")) for card in cards)
            raise self.error(
                f"serves {served}, none of them named {model}; serve only {model}"
            )
        (card,) = chosen
        self.model, self.root = str(card.get("id")), str(card.get("root") or "")
        self.context = int(card["max_model_len"]) if card.get("max_model_len") else None
        # vLLM and SGLang describe themselves under different paths; other servers may
        # not at all.
        info = self._optional("/server_info?config_format=json") or self._optional(
            "/get_server_info"
        )
        vllm = info["vllm_config"] if isinstance(info.get("vllm_config"), dict) else {}
        dtype = (vllm.get("model_config") or {}).get("dtype") or info.get("dtype")
        version = self._optional("/version").get("version") or info.get("version")
        # SGLang's sizes; vLLM's come from an answer's fingerprint (`_probe`).
        sizes = {name: info.get(f"{name}_size") for name in ("tp", "dp", "ep")}
        sizes = {name: size for name, size in sizes.items() if size and size != 1}
        self._probe()
        words = self._engine.split("-")[2:] or [
            f"{n}{size}" for n, size in sizes.items()
        ]
        self.facts = {
            "engine": str(card.get("owned_by") or "unknown"),
            "version": str(version) if version else None,
            "dtype": str(dtype or "auto").removeprefix("torch."),
            "parallelism": "-".join(words) or None,
        }
        if self.facts["dtype"] == "auto":
            self.facts["dtype"] = None

    def _probe(self) -> None:
        """Learn the fields of an answer, and vLLM's fingerprint, from one request."""
        body = {
            "prompt": [1, 2],
            "max_tokens": 1,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        try:
            # A server may refuse a field that it does not know.
            answer = self.ask({**body, "prompt_logprobs": 0})
        except UserError:
            answer = self.ask(body)
        choice = (answer.get("choices") or [{}])[0]
        self.prompt_logprobs = len(choice.get("prompt_logprobs") or ()) == 2
        self.token_ids = choice.get("token_ids") is not None
        self._engine = _engine_of(answer)

    def ask(self, body: Body) -> Body:
        """Ask once, and return the whole answer; tried again only where the server asks
        for it.
        """
        (answer,) = self.answers([body], lambda number, answer: answer)
        return answer

    def answers(
        self,
        bodies: Sequence[Body],
        read: Callable[[int, Body], Any],
        note: Callable[[int, Any], None] = lambda number, answer: None,
    ) -> list[Any]:
        """Ask for completions and return read(number, answer) of each, in order; `note`
        is called with each answer as it arrives.

        Overload (429), failures (5xx) and dropped connections are tried again, with
        growing pauses, until all of them have failed for `PATIENCE_S`, or one alone for
        four times as long.
        """
        return asyncio.run(self._answers(bodies, read, note)) if bodies else []

    async def _answers(
        self,
        bodies: Sequence[Body],
        read: Callable[[int, Body], Any],
        note: Callable[[int, Any], None],
    ) -> list[Any]:
        answers: list[Any] = [None] * len(bodies)
        waiting = iter(range(len(bodies)))
        outage = _Outage()
        pool = httpx2.Limits(
            max_connections=self.concurrency, max_keepalive_connections=self.concurrency
        )

        async def worker(client: httpx2.AsyncClient) -> None:
            # All workers draw from one iterator, so each request is taken once.
            for number in waiting:
                try:
                    answer = await self._patiently(client, bodies[number], outage)
                    answers[number] = read(number, answer)
                except (LookupError, TypeError, ValueError, AttributeError) as error:
                    raise self.error(
                        "answers /v1/completions without the requested fields"
                        f" ({one_line(error)})"
                    ) from None
                note(number, answers[number])

        async with httpx2.AsyncClient(
            headers=self._headers, timeout=_TIMEOUT, limits=pool
        ) as client:
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.concurrency, len(bodies))):
                        group.create_task(worker(client))
            except BaseExceptionGroup as errors:
                raise errors.exceptions[0] from None
        return answers

    async def _patiently(
        self, client: httpx2.AsyncClient, body: Body, outage: "_Outage"
    ) -> Body:
        """Repeat the request until an answer comes; outage: shared by all waiting
        requests.
        """
        pause = 0.25
        first_failure_s: float | None = None
        dropped = False
        while True:
            try:
                if dropped:  # the server may be back with another model
                    models = await client.get(f"{self.url}/v1/models")
                    self._require_same(self._body(models, "/v1/models"))
                    dropped = False
                response = await client.post(
                    f"{self.url}/v1/completions", json={"model": self.model, **body}
                )
                answer = self._body(response, "/v1/completions")
                ended = {
                    choice.get("finish_reason")
                    for choice in answer.get("choices") or ()
                }
                # A server that is shutting down cuts its answers off.
                if not ended <= {"stop", "length"}:
                    raise _Retry(f"finish_reason {', '.join(map(str, ended))}")
                if self._engine and (engine := _engine_of(answer)) != self._engine:
                    raise self.error(
                        f"now runs another engine ({engine}, not {self._engine});"
                        " restore the former settings, or evaluate into another folder"
                    )
                outage.since, outage.reported = None, False
                return answer
            except (httpx2.TransportError, _Retry) as error:
                now_s, text = time.monotonic(), one_line(error)
                first_failure_s = first_failure_s or now_s
                lasted_s = outage.lasted(self.url, text, now_s)
                if max(lasted_s, (now_s - first_failure_s) / 4) > PATIENCE_S:
                    raise self.error(
                        f"has not answered for {PATIENCE_S:g} s ({text}); start it"
                        " again as before and run the same command: fcsd has kept the"
                        " answers received so far"
                    ) from None
                dropped = isinstance(error, httpx2.TransportError)
                retry_after_s = error.after_s if isinstance(error, _Retry) else 0.0
            # Random pauses keep the workers from returning all at once.
            await asyncio.sleep(
                max(min(retry_after_s, 60.0), pause * random.uniform(0.5, 1.0))
            )
            pause = min(2 * pause, _LONGEST_WAIT_S)

    def _require_same(self, models: Body) -> None:
        served = {
            str(card.get("id")): str(card.get("root") or "")
            for card in models.get("data") or ()
        }
        if served.get(self.model) != self.root:
            current = ", ".join(root or name for name, root in served.items())
            raise self.error(
                f"now serves {current} instead of {self.root or self.model};"
                " start it again as before and run the same command: fcsd has kept the"
                " answers received so far"
            )

    def _get(self, path: str) -> Body:
        try:
            response = httpx2.get(
                self.url + path, headers=self._headers, timeout=_TIMEOUT
            )
        except (httpx2.TransportError, httpx2.InvalidURL) as error:
            raise self.error(
                f"cannot be reached ({one_line(error)}); is the server up, and is this"
                " its address?"
            ) from None
        try:
            return self._body(response, path)
        except _Retry as error:
            raise self.error(
                f"is not ready ({error}); wait until it serves, and run again"
            ) from None

    def _optional(self, path: str) -> Body:
        with contextlib.suppress(UserError):
            return self._get(path)
        return {}

    def _body(self, response: httpx2.Response, path: str) -> Body:
        status = response.status_code
        if status in (401, 403):
            reason = f"requires a key; set {API_KEY}"
            if self._headers:
                reason = f"rejects the key in {API_KEY}"
            raise self.error(f"{reason} (HTTP {status})")
        # Overload and outages pass, so the caller asks again.
        if status in _RETRIED:
            after = response.headers.get("retry-after", "")
            after_s = float(after) if after.isdigit() else 0.0
            raise _Retry(f"HTTP {status}", after_s)
        try:
            body = response.json()
        except ValueError:
            kind = response.headers.get("content-type", "no type").partition(";")[0]
            raise self.error(
                f"answers {path} with HTTP {status} and {kind}, not JSON: the address"
                " belongs to another program, or to a proxy"
            ) from None
        # Some proxies answer errors with status 200.
        if status != 200 or (isinstance(body, dict) and body.get("error")):
            raise self.error(f"refuses {path} (HTTP {status}): {_said(body)}")
        if not isinstance(body, dict):
            raise self.error(
                f"answers {path} with unexpected JSON; this is not an OpenAI-compatible"
                " server"
            )
        return body

    def error(self, text: str) -> UserError:
        """Return an error that begins with the address."""
        return UserError(f"server {self.url} {text}")

    def refuse(self, *rules: Rule) -> None:
        """Raise this error for the first of the rules that does not hold."""
        refuse(*rules, where=f"server {self.url} ")

    def context_rule(self, task: str, tokens: int, text: str) -> Rule:
        """Return the rule about the context, and the tokens that a task needs for a
        prompt and a text.
        """
        context = self.context
        return (
            context is not None and tokens > context,
            f"accepts {context} tokens, but task {task} needs {tokens} for a prompt and"
            f" its {text}; start it with --max-model-len {tokens} or more",
        )


def _engine_of(answer: Body) -> str:
    """Return vLLM's fingerprint in an answer, such as vllm-0.32.0-tp2-ep, without the
    hash of its settings.
    """
    words = str(answer.get("system_fingerprint") or "").split("-")
    return "-".join(words[:-1]) if words[0] == "vllm" else ""


def _said(answer: Any) -> str:
    """Return the server's message about an error, in one line; vLLM, OpenAI and FastAPI
    put it in different places.
    """
    detail = answer
    for key in ("error", "message", "detail"):
        if isinstance(detail, dict) and key in detail:
            detail = detail[key]
    text = detail if isinstance(detail, str) else json.dumps(detail)
    return " ".join(text.split())[:300]
