import jaxtyping
import pytest


@pytest.fixture
def as_in_production(monkeypatch):
    """Without the checks of signatures, which would speak before our own."""
    monkeypatch.setattr(type(jaxtyping.config), "jaxtyping_disable", property(lambda _: True))
