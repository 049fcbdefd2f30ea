"""Bridge classes of mbridge that are used here, imported without the others.

mbridge's package of models imports every model, and some of those import transformers' modelling code. On NPUs that fails: it looks for
flash-attn, and MindSpeed's adaptor has put an empty package in its place. So mbridge's package is put into `sys.modules` without running
its `__init__`, which also starts each rank half a second earlier.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_PACKAGE = "mbridge.models"


def _open_package() -> None:
    found = importlib.util.find_spec("mbridge")
    if _PACKAGE in sys.modules or found is None:
        return
    spec = ModuleSpec(_PACKAGE, None, is_package=True)
    spec.submodule_search_locations = [str(Path(path) / "models") for path in found.submodule_search_locations or []]
    package = ModuleType(_PACKAGE)
    package.__spec__, package.__path__ = spec, spec.submodule_search_locations
    sys.modules[_PACKAGE] = package


_open_package()

from mbridge.models.llama import LLaMABridge  # noqa: E402  the package comes first
from mbridge.models.qwen2 import Qwen2Bridge  # noqa: E402
from mbridge.models.qwen3 import Qwen3Bridge  # noqa: E402

__all__ = ["LLaMABridge", "Qwen2Bridge", "Qwen3Bridge"]
