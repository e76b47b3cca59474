"""A server that speaks vLLM's protocol (0.32, `entrypoints/openai`), with a model in
this process behind it.

It is written from vLLM's own files, and shares no code with the client: requests are
checked as vLLM checks them, each is computed alone, and answers have all the fields of
vLLM's, used or not.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from tests.support import cache_of


class Engine:
    """What is served, what was requested, and which faults to simulate.

    Attributes:
        faults: taken one by one by the next completions: a status, or "drop", "abort",
            "html", "another" (it ends, and something else is served under the same
            name), "short" (a limit of its own); the rest is answered.
        bodies, keys: of every completion that was answered; the Authorization of every
        request.
    """

    def __init__(self, model: Any, tokenizer: Any, *, name: str = "served"):
        self.model, self.tokenizer, self.name, self.root = model, tokenizer, name, name
        self.context = int(model.config.get_text_config().max_position_embeddings) + 2
        self.version, self.parallel = "0.32.0", "tp2-ep-"
        self.api_key: str | None = None
        self.prompt_logprobs, self.token_ids, self.html = True, True, False
        self.faults: list[int | str] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    def complete(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Return status and answer of POST /v1/completions."""
        vocabulary = self.model.config.get_text_config().vocab_size
        prompt, new = body["prompt"], body.get("max_tokens", 16)
        if body["model"] != self.name:
            return 404, _error(
                404, f"The model `{body['model']}` does not exist.", "NotFoundError"
            )
        if not isinstance(prompt, list) or not all(
            isinstance(token, int) for token in prompt
        ):
            return 400, _error(400, "text was sent")
        if max(prompt) >= vocabulary:
            return 400, _error(400, f"Token id {max(prompt)} is out of vocabulary")
        if len(prompt) + new > self.context:
            return 400, _error(
                400, f"This model's maximum context length is {self.context} tokens."
            )
        if body.get("prompt_logprobs") is not None and not self.prompt_logprobs:
            return 400, _error(400, "prompt_logprobs is not supported")
        with self.lock, torch.no_grad():
            logprobs = None
            if body.get("prompt_logprobs") is not None:
                logprobs = self._prompt_logprobs(prompt, body["prompt_logprobs"])
            made, reason, stopped_by = self._generate(prompt, new, body)
            self.bodies.append(body)
        text = self._text(made, body, stopped_by)
        choice = {
            "index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stopped_by,
            "token_ids": made if body.get("return_token_ids") and self.token_ids else None,
            "prompt_logprobs": logprobs, "prompt_token_ids": None, "routed_experts": None,
        }  # fmt: skip
        return 200, {
            "id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.name, "choices": [choice],
            "service_tier": None, "system_fingerprint": f"vllm-{self.version}-{self.parallel}0a1b2c3d",
            "usage": {"prompt_tokens": len(prompt), "completion_tokens": len(made)},
        }  # fmt: skip

    def _prompt_logprobs(self, prompt: list[int], top: int) -> list[Any]:
        logprobs = (
            self.model(input_ids=torch.tensor([prompt]))
            .logits[0]
            .float()
            .log_softmax(-1)
        )
        entries: list[Any] = [None]
        for place, token in enumerate(prompt[1:]):
            row = logprobs[place]
            best = [token, *row.topk(top).indices.tolist()] if top else [token]
            entries.append(
                {
                    str(each): {
                        "logprob": float(row[each]),
                        "rank": int((row >= row[each]).sum()),
                        "decoded_token": self.tokenizer.decode([each]),
                    }
                    for each in best
                }
            )
        return entries

    def _generate(
        self, prompt: list[int], new: int, body: dict[str, Any]
    ) -> tuple[list[int], str, Any]:
        """Return one token after the other; sampled ones from a generator with the
        request's seed.
        """
        ends = set(body.get("stop_token_ids") or ())
        if not body.get("ignore_eos"):
            ends.add(self.tokenizer.eos_token_id)
        generator = torch.Generator().manual_seed(body.get("seed") or 0)
        made: list[int] = []
        read, cache = prompt, {}
        while len(made) < new:
            out = self.model(input_ids=torch.tensor([read]), use_cache=True, **cache)
            logits, cache = out.logits[0, -1].float(), cache_of(out)
            if temperature := body.get("temperature", 1.0):
                token = int(
                    torch.multinomial(
                        (logits / temperature).softmax(-1), 1, generator=generator
                    )
                )
            else:
                token = int(logits.argmax())
            made.append(token)
            read = [token]
            if token in ends:
                return made, "stop", token
            if (stop := self._stop_in(made, body)) is not None:
                return made, "stop", stop
        return made, "length", None

    def _stop_in(self, made: list[int], body: dict[str, Any]) -> str | None:
        """Return the stop string that the text has reached."""
        text = self.tokenizer.decode(
            made, skip_special_tokens=body.get("skip_special_tokens", True)
        )
        return next((stop for stop in body.get("stop") or () if stop in text), None)

    def _text(self, made: list[int], body: dict[str, Any], stopped_by: Any) -> str:
        kept = made[:-1] if isinstance(stopped_by, int) else made
        text = str(
            self.tokenizer.decode(
                kept, skip_special_tokens=body.get("skip_special_tokens", True)
            )
        )
        return text.partition(stopped_by)[0] if isinstance(stopped_by, str) else text


def _error(code: int, message: str, kind: str = "BadRequestError") -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


@contextmanager
def serving(engine: Engine) -> Iterator[str]:
    """Run a server in a thread for the duration of the block, and yield its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version, timeout = "HTTP/1.1", 20

        def log_message(self, *args: Any) -> None:
            pass

        def answer(
            self, status: int, content: Any, kind: str = "application/json"
        ) -> None:
            data = (
                content.encode()
                if isinstance(content, str)
                else json.dumps(content).encode()
            )
            with suppress(ConnectionError):  # the client may have gone
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        def allowed(self) -> bool:
            engine.keys.append(self.headers.get("Authorization"))
            if engine.html:
                self.answer(
                    200, "<html><body>Welcome</body></html>", "text/html; charset=utf-8"
                )
                return False
            guarded = engine.api_key is not None and self.path.startswith("/v1")
            if guarded and engine.keys[-1] != f"Bearer {engine.api_key}":
                self.answer(401, {"error": "Unauthorized"})
                return False
            return True

        def do_GET(self) -> None:
            if not self.allowed():
                return
            card = {
                "id": engine.name, "object": "model", "created": 1, "owned_by": "vllm", "root": engine.root,
                "parent": None, "max_model_len": engine.context, "permission": [],
            }  # fmt: skip
            known = {
                "/v1/models": {"object": "list", "data": [card]},
                "/version": {"version": engine.version},
            }
            content = known.get(self.path)
            (
                self.answer(200, content)
                if content
                else self.answer(404, {"detail": "Not Found"})
            )

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if not self.allowed():
                return
            fault = engine.faults.pop(0) if engine.faults else None
            if fault == "short":
                body["max_tokens"] -= 1
            if fault == "another":
                engine.root = "another/model"
            if fault in ("drop", "another"):
                self.close_connection = True
                self.connection.shutdown(2)
            elif fault == "html":
                self.answer(200, "<html></html>", "text/html")
            elif isinstance(fault, int):
                self.answer(fault, _error(fault, "try again"))
            else:
                status, content = engine.complete(body)
                if fault == "abort":
                    content["choices"][0]["finish_reason"] = "abort"
                self.answer(status, content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        # a thread in a forward pass would outlive the interpreter
        server.daemon_threads = False
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
