"""`reasoning-gym` in half of the time and memory: without the plots that a dependency of two of its tasks would import for itself."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_PLOTTING = (
    "matplotlib",
    "matplotlib.animation",
    "matplotlib.collections",
    "matplotlib.pyplot",
    "mpl_toolkits",
    "mpl_toolkits.mplot3d",
)
"""What cellpylib, cellular automata, imports for functions that draw."""


def import_reasoning_gym() -> ModuleType:
    """The package; ImportError where it is not installed. Whoever imports matplotlib later gets the real one."""
    absent = {} if _PLOTTING[0] in sys.modules else {name: ModuleType(name) for name in _PLOTTING}
    for name, module in absent.items():
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(absent[parent], child, module)
    if absent:
        absent["mpl_toolkits.mplot3d"].Axes3D = None  # type: ignore[attr-defined]
    sys.modules.update(absent)
    try:
        return importlib.import_module("reasoning_gym")
    finally:
        for name in absent:
            del sys.modules[name]
