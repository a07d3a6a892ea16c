"""One Serve for all tests of the service, serving a tiny random model over HTTP."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import httpx
import openai
import pytest
from ray import cloudpickle, serve
from service import free_port
from support import fake_rank, scripted
from support.checkpoints import make_deepseek_v3
from support.service import APPLICATION, MAX_ONGOING, MAX_WAITING, MODEL, SLOTS, Deploy, Service

from raysonar import Engine
from raysonar.demo import TARGET
from raysonar.serving import app
from raysonar.serving.app import build_app


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random DeepSeek-V3 with an MTP module, in fp32; 512 positions."""
    return make_deepseek_v3(tmp_path_factory.mktemp("serving") / MODEL, mtp=1)


@pytest.fixture(scope="session")
def engine(folder: Path) -> Iterator[Engine]:
    """The same model in this process: what the service must agree with."""
    with Engine.from_folder(folder, threads=1, max_running=SLOTS) as engine:
        yield engine


@pytest.fixture(scope="session")
def service(folder: Path, ray_cluster: None) -> Iterator[Service]:
    port = free_port()
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        args = {
            "engine": {
                "model": str(folder),
                "scheduling": {"max_running": SLOTS, "max_waiting": MAX_WAITING},
            },
            "max_ongoing_requests": MAX_ONGOING,
        }
        serve.run(build_app(args), name=APPLICATION)
        yield Service(f"http://127.0.0.1:{port}")
    finally:
        serve.shutdown()


@pytest.fixture(scope="module")
def deploy(service: Service) -> Iterator[Deploy]:
    """Serve an application under its name, beside the tests' common one, until the module's tests are done."""
    names: set[str] = set()

    def deploy(name: str, application: serve.Application) -> Service:
        names.add(name)
        serve.run(application, name=name, route_prefix=f"/{name}")
        return Service(f"{service.url}/{name}", name)

    yield deploy
    for name in names:
        serve.delete(name)


@pytest.fixture(scope="module")
def start_scripted(deploy: Deploy, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Service]:
    """Serve a scripted model beside the other one: its name, its chat template, options of the engine and the
    service."""
    for module in (fake_rank, scripted):
        cloudpickle.register_pickle_by_value(module)

    def start(
        name: str, template: str, *, special: bool = False, service_options: Mapping[str, object] = {}, **engine: object
    ) -> Service:
        folder = scripted.make_folder(tmp_path_factory.mktemp("scripted") / name, template=template, special=special)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(app, "Driver", scripted.ScriptedDriver)
            options = {"max_ongoing_requests": 64, **service_options}
            application = build_app({"engine": {"model": str(folder), **engine}, **options})
        return deploy(name, application)

    return start


@pytest.fixture(scope="session")
def pair(service: Service) -> Service:
    """The demo model on two ranks, each with requests of its own; every step that can be is run as two halves."""
    engine = {
        "model": str(TARGET),
        "threads": 1,
        "max_model_len": 256,
        "scheduling": {"max_running": 4},
        "speculation": {"tokens": 2},
        "parallel": {"data": 2, "micro_batching": "always"},
    }
    serve.run(build_app({"engine": engine, "model_name": "pair"}), name="pair", route_prefix="/pair")
    return Service(f"{service.url}/pair", "pair")


@pytest.fixture
def http(service: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=service.url, timeout=60.0) as client:
        yield client


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    """OpenAI's client, unchanged."""
    with openai.OpenAI(base_url=f"{service.url}/v1", api_key="any", max_retries=0, timeout=60.0) as client:
        yield client
