"""Rewards of MindSpeed-RL's trainers: one rule is a verifier, several are a rubric with the same weights."""

from __future__ import annotations

from services.cli.imports.draft import Draft
from services.cli.imports.settings import Settings

RULE, FUNCTIONS, WEIGHTS = "rl_config.rule_reward", "rl_config.verifier_function", "rl_config.verifier_weight"
METRIC = "rl_config.filter_groups_metric"

SAME = {"acc_for_dapo": "dapo_math", "math_17k_acc": "math", "format": "format"}
"""Rule → verifier that judges alike."""
NEAREST = {"acc": "math", "base_acc": "math", "strict_format": "format"}
"""Rule → verifier that looks for the same with other rewards."""
FORMAT_PATTERN = r"<think>.*?</think>\s*<answer>.*?</answer>(?:\n.*)?"
"""What rule `format` matches: it lets further lines follow."""
RUBRIC = "weighted"


def verifiers(settings: Settings, draft: Draft) -> None:
    """Rule rewards, and their weights."""
    names = [str(name) for name in settings.items(FUNCTIONS)]
    if settings.truth(RULE) is False:
        draft.differ(RULE, "reward models have no counterpart: verifiers judge")
    else:
        draft.leave(RULE, "verifiers judge")
    if not names:
        draft.leave(FUNCTIONS, "the verifier is chosen by data_source")
        draft.leave(WEIGHTS, "the verifier is chosen by data_source")
        return
    given = [float(each) for each in settings.items(WEIGHTS) if isinstance(each, int | float)]
    paired = len(given) == len(names) and all(weight > 0 for weight in given)
    weights = _by_verifier(names, given if paired else [1.0] * len(names))
    alike = all(name in SAME for name in names)
    others = ", ".join(name for name in names if name not in SAME)
    remark = "" if alike else f"the nearest for {others}: rewards or formats differ"
    if "format" in names:
        draft.set("reward.config", {"format": {"format_pattern": FORMAT_PATTERN}}, FUNCTIONS)
    if [*weights.values()] == [1.0]:
        draft.set("reward.verifiers", {"*": next(iter(weights))}, FUNCTIONS, remark=remark, fits=alike)
        draft.leave(WEIGHTS, "one verifier, with weight 1", fits=paired)
        return
    draft.set("reward.verifiers", {"*": RUBRIC}, FUNCTIONS, remark=remark, fits=alike)
    rubric: dict[str, object] = {"verifier_function": [*weights], "verifier_weight": [*weights.values()]}
    metric = SAME.get(settings.text(METRIC) or "")
    if metric in weights:
        rubric["accuracy_of"] = metric
    unpaired = "" if paired else "weights that are no positive numbers, one for each function, have no counterpart"
    draft.set("reward.rubrics", {RUBRIC: rubric}, FUNCTIONS, WEIGHTS, remark=unpaired, fits=paired and alike)


def _by_verifier(names: list[str], weights: list[float]) -> dict[str, float]:
    """Verifier → weight of all rules that became it; the nearest to every rule is one of mathematics, but for those without any."""
    found: dict[str, float] = {}
    for name, weight in zip(names, weights, strict=True):
        verifier = SAME.get(name) or NEAREST.get(name)
        if verifier is not None:
            found[verifier] = found.get(verifier, 0.0) + weight
    return found or {"math": 1.0}
