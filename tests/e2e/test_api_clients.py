"""Requests as clients sent them that are not installed for tests: each works, and nothing of it is ignored.

tests/golden/clients.json has one per client and habit, taken from a request log.
"""

import json

import pytest
from conftest import ROOT
from serving import Server

REQUESTS = json.loads((ROOT / "tests" / "golden" / "clients.json").read_text())


@pytest.fixture(scope="module")
def server():
    s = Server()
    yield s
    s.close()


@pytest.mark.parametrize("sent", REQUESTS, ids=[r["client"] for r in REQUESTS])
def test_request_of(server, sent):
    reply = server.post(sent["path"], sent["body"])
    assert reply.status == 200 and "X-Ignored-Params" not in reply.headers, reply.text
    last = {"/v1/messages": "message_stop", "/v1/responses": "response.completed"}.get(sent["path"], "[DONE]")
    assert (last in reply.text) == bool(sent["body"].get("stream")), reply.text[-300:]
