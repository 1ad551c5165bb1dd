import pytest

from tests.vllm_engines import engines


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """What engines of vLLM do with runs: see tests/vllm_runs.py."""
    with engines(tmp_path_factory.mktemp("engines")) as run:
        yield run
