"""The rollout service on the scripted engine, with fail points; a second one of its name has a stage of its own, as on another machine."""

from __future__ import annotations

import os

from services.rollout import attachment, engine, service
from services.rollout.__main__ import main
from tests.chaos.entry import tamper
from tests.chaos.scripted.engine import ScriptedEngine, ScriptedPrompts
from tests.chaos.stack import SECOND

if __name__ == "__main__":
    vars(engine)["PromptProcess"] = ScriptedPrompts
    vars(service)["Engine"] = ScriptedEngine
    if SECOND in os.environ:
        vars(attachment)["default_stage_directory"] = lambda worker, home, _: home / "second" / worker
    tamper("rollout")
    main()
