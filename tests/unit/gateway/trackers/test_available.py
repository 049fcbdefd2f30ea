from __future__ import annotations

from typing import Any

import pytest

from services.common.config.settings import Settings
from services.common.errors import ConfigError
from services.common.spec.trackers import TrackersSpec
from services.gateway.trackers import available
from services.gateway.trackers.available import check_trackers, options_of

KEY = "0123456789abcdef0123456789abcdef01234567"
CONFIGURED = {
    "mlflow": {"mlflow_uri": "http://127.0.0.1:5000", "mlflow_token": KEY},
    "wandb": {"wandb_api_key": KEY, "wandb_entity": "team"},
    "swanlab": {"swanlab_api_key": KEY, "swanlab_url": "http://127.0.0.1:5001"},
}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "installed_version", lambda _: "1.0")


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("name", sorted(CONFIGURED))
def test_a_tracker_that_is_not_configured_is_refused_at_its_field(name: str) -> None:
    spec = TrackersSpec.model_validate({name: True})
    with pytest.raises(ConfigError, match=f"^trackers.{name}: is not configured here: set MILLRACE_{name.upper()}"):
        check_trackers(spec, Settings())
    settings: Any = CONFIGURED[name]
    check_trackers(spec, Settings(**settings))


@pytest.mark.parametrize("name", ["wandb", "swanlab"])
@pytest.mark.usefixtures("installed")
def test_offline_needs_no_key(name: str) -> None:
    settings: Any = {f"{name}_mode": "offline"}
    check_trackers(TrackersSpec.model_validate({name: True}), Settings(**settings))


def test_a_client_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "installed_version", lambda _: None)
    with pytest.raises(ConfigError, match=r"^trackers\.wandb: its client is not installed here: pip install wandb$"):
        check_trackers(TrackersSpec(wandb=True), Settings())


@pytest.mark.parametrize("name", sorted(CONFIGURED))
def test_a_key_is_in_the_options_of_its_own_tracker_only(name: str) -> None:
    every: Any = {key: value for part in CONFIGURED.values() for key, value in part.items()}
    settings = Settings(**every | {f"{name}_api_key" if name != "mlflow" else "mlflow_token": "x" * 40})
    for other in ("files", "tensorboard", *CONFIGURED):
        assert ("x" * 40 in options_of(other, settings).values()) == (other == name)
    assert KEY not in str(settings.public())
    assert "x" * 40 not in str(settings.public()) + repr(settings)
