"""The rollout service on the scripted engine, with fail points."""

from __future__ import annotations

from services.rollout import engine, service
from services.rollout.__main__ import main
from tests.chaos.entry import tamper
from tests.chaos.scripted.engine import ScriptedEngine, ScriptedPrompts

if __name__ == "__main__":
    vars(engine)["PromptEncoder"] = ScriptedPrompts
    vars(service)["Engine"] = ScriptedEngine
    tamper("rollout")
    main()
