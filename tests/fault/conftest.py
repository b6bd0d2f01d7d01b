import pytest

from data_pipeline.store.open import open_store
from launch.local.s3_server import S3Server
from tests.fault.fault_proxy import FaultProxy


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory):
    """One real server for all fault tests; each test uses separate keys."""
    with S3Server(tmp_path_factory.mktemp("s3"), "fault-tests") as server:
        yield server
        server.stop(timeout=0)  # kills the server, because no data has to be kept


@pytest.fixture
def s3_environment(s3_server, monkeypatch):
    """Put the server's credentials into the environment, without any profile of the host."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name, value in s3_server.environment().items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def proxy(s3_server):
    with FaultProxy(s3_server.endpoint) as running:
        yield running


@pytest.fixture
def store(s3_environment, proxy, request):
    """A store with a separate prefix whose requests all pass the proxy."""
    uri = f"s3://{s3_environment.bucket}/{request.node.name.split('[')[0]}"
    return open_store(uri, endpoint=proxy.endpoint, attempts=4)
