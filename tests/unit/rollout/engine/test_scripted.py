"""The chaos slice's tokenizer keeps up with the one it stands for: whoever changes a signature is told here, not by a campaign."""

from __future__ import annotations

import inspect

from services.rollout.engine.prompt_process import PromptProcess
from tests.chaos.scripted.engine import ScriptedPrompts


def test_every_method_of_the_scripted_tokenizer_takes_the_arguments_of_the_method_it_replaces() -> None:
    replaced = [name for name in vars(ScriptedPrompts) if inspect.isfunction(vars(ScriptedPrompts)[name])]
    assert {"__init__", "encode", "decode"} <= set(replaced)
    for name in replaced:
        wanted, found = (
            list(inspect.signature(vars(kind)[name]).parameters) for kind in (PromptProcess, ScriptedPrompts)
        )
        assert found == wanted, name
