import pytest

from tests.vllm_engines import engines


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """What engines of vLLM do with runs: see tests/vllm_runs.py."""
    with engines(tmp_path_factory.mktemp("engines")) as run:
        yield run


@pytest.fixture
def vllm_with(tmp_path, monkeypatch):
    """A function that puts a package of vLLM's name in place, which can be found: its registry has these models."""

    models = tmp_path / "site" / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (tmp_path / "site" / "vllm" / "__init__.py").write_text("raise AssertionError('vLLM is started')")

    def put(*names: str) -> None:
        (models / "registry.py").write_text("".join(f'"{name}": ...,\n' for name in names))

    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    return put
