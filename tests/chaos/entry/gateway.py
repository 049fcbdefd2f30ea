"""The gateway, with fail points; the scripted model passes its checks."""

from __future__ import annotations

import sys

from services.gateway import admission
from services.gateway.__main__ import main
from tests.chaos.entry import tamper

if __name__ == "__main__":
    vars(admission)["CHECKS"] = "tests.chaos.scripted.checks:ScriptedChecks"
    tamper("gateway")
    sys.exit(main())
