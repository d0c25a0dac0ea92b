"""A server's counts, read over a loopback that answers as SGLang 0.5.23 does."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eyas.drafter import acceptance as ac
from eyas.drafter import served
from eyas.errors import EyasError

INFO: dict[str, Any] = {
    "speculative_algorithm": "EAGLE3",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "internal_states": [{"avg_spec_accept_length": 1.9}],
}


def answer_to(body: dict[str, Any]) -> dict[str, Any]:
    """Reply with seven tokens in three verifications: 1, 0 and 3 drafts accepted."""
    assert body["sampling_params"]["temperature"] == 0
    first = body["input_ids"][0]
    meta = {"spec_verify_ct": 3, "spec_correct_drafts_histogram": [1, 1, 0, 1]}
    return {"output_ids": [first] * 7, "meta_info": meta}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.say(INFO if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if not body["input_ids"]:
            self.send_error(400, "no ids")
            return
        self.say(answer_to(body))

    def say(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    request_queue_size = 64


@pytest.fixture
def url() -> Iterator[str]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_replies_come_in_the_order_of_the_prompts_with_their_counts(url: str) -> None:
    prompts = [[number] for number in range(40)]
    replies = served.ask_all(url, prompts, max_new_tokens=7, stop_ids=(2,))
    assert [reply.ids[0] for reply in replies] == list(range(40))
    assert {(reply.verifications, reply.histogram) for reply in replies} == {(3, (1, 1, 0, 1))}


def test_a_histogram_gives_tau_and_acceptance_by_position() -> None:
    reply = served.Reply(ids=(9,) * 8, verifications=3, histogram=(1, 1, 0, 1))
    verified = reply.verified(3)
    assert verified == ac.Verified(gains=(1, 2, 4), accepted=(0, 1, 3), judged=(1, 2, 3))
    assert ac.tau_of([verified.gains]) == (len(reply.ids) - 1) / reply.verifications
    assert ac.acceptance_by_position([verified], 3) == [2 / 3, 1 / 2, 1.0]


def test_drafts_past_the_end_of_a_reply_gain_nothing() -> None:
    reply = served.Reply(ids=(9,) * 6, verifications=3, histogram=(1, 1, 0, 1))
    assert reply.verified(3).gains == (1, 2, 2)
    none = served.Reply(ids=(9,), verifications=0, histogram=())
    assert none.verified(3) == ac.Verified(gains=(), accepted=(), judged=())


@pytest.mark.parametrize(
    "meta", [{"spec_verify_ct": 2}, {"spec_verify_ct": 2, "spec_accept_histogram": [1, 0]}]
)
def test_counts_that_do_not_add_up_are_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(EyasError, match="expected a histogram of 2 verifications"):
        served.reply_of({"output_ids": [1], "meta_info": meta})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", None),
        ("speculative_num_steps", 5),
        ("speculative_eagle_topk", 4),
    ],
)
def test_a_server_that_drafts_by_other_rules_is_refused(
    url: str, name: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(INFO, name, value)
    with pytest.raises(EyasError, match=f"{name}: expected .*, got {value}"):
        served.check_server(served.server_info(url), 3)


def test_an_error_of_the_server_and_a_missing_one_are_named(url: str) -> None:
    with pytest.raises(EyasError, match="HTTP 400"):
        served.ask_all(url, [[]], max_new_tokens=1, stop_ids=())
    with pytest.raises(EyasError, match="no answer"):
        served.server_info("http://127.0.0.1:9")
