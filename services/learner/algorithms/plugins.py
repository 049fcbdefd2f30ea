"""Loading of advantage estimators and token losses that installed packages offer, by name.

A package offers one in its pyproject.toml; both are pure, since a step is replayed from its journal:

    [project.entry-points."millrace.advantages"]
    my_estimator = "my_package.algorithms:my_estimator"   # (Responses, AlgorithmSpec) -> Estimate, see advantages.py
    [project.entry-points."millrace.losses"]
    my_loss = "my_package.algorithms:my_loss"             # (LossInputs, AlgorithmSpec) -> (token loss [R], metrics), see losses.py

A job names it (`algorithm.advantage_estimator: my_estimator`, `algorithm.loss: my_loss`) and never brings code. Names are checked without
an import, and so without torch, by `services.common.config.plugins.check_installed`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from services.common.config.plugins import offered
from services.common.errors import ConfigError


def load(group: str, name: str, field: str) -> Callable[..., Any]:
    """The function of this name in an entry-point group.

    Args:
        group: `plugins.ADVANTAGES` or `plugins.LOSSES`.
        name: as the job names it.
        field: the job's field, for the errors.

    Raises:
        ConfigError: no installed package offers it, it cannot be imported, or it cannot be called.
    """
    points = offered(group)
    if name not in points:
        known = ", ".join(sorted(points)) or "none"
        raise ConfigError(f"no installed package offers {name!r}; offered: {known}", field=field)
    try:
        function = points[name].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be loaded: {error}", field=field) from error
    if not callable(function):
        raise ConfigError(f"{name!r} is no function", field=field)
    return cast("Callable[..., Any]", function)
