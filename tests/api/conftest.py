"""One server of the talking model, with drafts, for all tests of this directory."""

from __future__ import annotations

import pytest
from openai import OpenAI

from vllm_ascend_dsv41.deploy.check import Service
from vllm_ascend_dsv41.deploy.demo import ENVIRONMENT, FLAGS
from vllm_ascend_dsv41.deploy.server import Server
from vllm_ascend_dsv41.quant import Weights, convert
from vllm_ascend_dsv41.tiny_checkpoint import write_talking


@pytest.fixture(scope="session")
def talking(tmp_path_factory):
    """Its W8A8 conversion."""
    root = tmp_path_factory.mktemp("talking")
    write_talking(root / "official")
    return convert(root / "official", root / "w8a8", Weights.W8A8)


@pytest.fixture(scope="session")
def startup_report(tmp_path_factory):
    """What the server writes when it is ready."""
    return tmp_path_factory.mktemp("report") / "startup.json"


@pytest.fixture(scope="session")
def server(talking, startup_report, tmp_path_factory):
    """As ``dsv41 demo`` starts it."""
    # memory must stand still in test_load.py: a block takes its memory when it is first written, and oneDNN keeps code
    # for the last 1,024 shapes that it multiplied, some 400 MiB
    environment = {**ENVIRONMENT, "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8", "MALLOC_ARENA_MAX": "2"}
    environment["DSV41_STARTUP_REPORT"] = str(startup_report)
    options = [*FLAGS, "--enable-prompt-tokens-details", "--num-gpu-blocks-override", "1500"]
    with Server(talking, options, tmp_path_factory.mktemp("log") / "server.log", env=environment) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=120, max_retries=0) as made:
        yield made


@pytest.fixture(scope="session")
def service(server):
    made = Service(server.url, "", 120)
    yield made
    made.close()
