"""Runs the clients of trainers against a server: AReaL's SGLangBackend, which builds requests and reads
replies, and verl's HTTP adapters, which also send them. Each is the package of its name, without
what it depends on (empty_modules.py).

    trainer_client.py areal|verl < JOB

The job is a JSON object; what came back is a JSON object on standard output.
"""

import asyncio
import base64
import json
import sys
import types

import numpy  # noqa: F401  before modules are emptied
import requests
from empty_modules import empty_what_is_missing

PARAMETERS = {"max_new_tokens": 24, "temperature": 0.7, "ignore_eos": True}


def areal(job):
    from areal.api.cli_args import GenerationHyperparameters
    from areal.api.io_struct import ModelRequest, WeightUpdateMeta
    from areal.engine.sglang_remote import SGLangBackend

    backend = SGLangBackend()

    def call(request):
        reply = requests.request(request.method, job["url"] + request.endpoint, json=request.payload)
        assert reply.ok, reply.text
        return reply.json() if "json" in reply.headers["Content-Type"] else reply.text

    def sample():
        asked = ModelRequest(input_ids=list(job["ids"]), gconfig=GenerationHyperparameters(**PARAMETERS), metadata={"return_routed_experts": True})
        return backend.parse_generation_response(call(backend.build_generation_request(asked, False, 0)))

    def score(answer):
        ids = job["ids"] + answer.output_tokens
        reply = call(backend.build_score_request(ids, len(answer.output_tokens), False, 0))
        return backend.parse_score_response(reply, len(answer.output_tokens))

    def cycle(folder):
        call(backend.get_pause_request())
        meta = WeightUpdateMeta(type="disk", path=folder)
        for request in backend.build_disk_weight_update_requests(meta).requests:
            call(request)
        call(backend.get_resume_request())

    def shown(answer):
        return {
            "tokens": answer.output_tokens, "logprobs": answer.output_logprobs, "stop": answer.stop_reason,
            "routes": answer.routed_experts.tolist(), "scores": score(answer),
        }  # fmt: skip

    call(backend.get_health_check_request())
    out = []
    for folder in job["folders"]:
        cycle(folder)
        out.append(shown(sample()))
    call(backend.get_pause_request())
    call(backend.get_offload_request())
    call(backend.get_onload_request(["weights"]))
    cycle(job["folders"][-1])
    call(backend.get_onload_request())
    out.append(shown(sample()))
    return out


def verl(job):
    from verl.workers.rollout.sglang_rollout import http_server_engine as engine

    engine.ServerArgs = lambda **given: types.SimpleNamespace(node_rank=0, **given)
    where = {"host": "127.0.0.1", "port": job["port"], "launch_server": False, "max_attempts": 1}
    adapter = engine.HttpServerAdapter(**where)

    def message(pickles, load_format=None):
        data = [base64.b64decode(p) for p in pickles]
        return types.SimpleNamespace(serialized_named_tensors=data, load_format=load_format, flush_cache=True)

    def sample():
        answer = adapter.generate(input_ids=job["ids"], sampling_params={**PARAMETERS, "sampling_seed": 3}, return_logprob=True)
        return answer["meta_info"]["output_token_logprobs"]

    async def asynchronous():
        other = engine.AsyncHttpServerAdapter(**where)
        await other.release_memory_occupation(["kv_cache"])
        await other.resume_memory_occupation(["kv_cache"])
        return await other.update_weights_from_tensor(message(job["old"]))

    out = {"before": sample()}
    out["flush"] = adapter.flush_cache()
    adapter.release_memory_occupation(["kv_cache"])
    adapter.resume_memory_occupation(["kv_cache"])
    out["update"] = adapter.update_weights_from_tensor(message(job["new"]))
    out["after"] = sample()
    out["async"] = asyncio.run(asynchronous())
    out["again"] = sample()
    adapter.abort_request(abort_all=True)
    return out


if __name__ == "__main__":
    job = json.load(sys.stdin)
    if sys.argv[1] == "verl":
        import aiohttp  # noqa: F401
    empty_what_is_missing("areal", "verl")
    print(json.dumps({"areal": areal, "verl": verl}[sys.argv[1]](job)))
